// Storages of the frame alone: nothing of the view is kept in the browser, where Jupyter keeps its
// own, and a frame without an origin has none.
for (const name of ["localStorage", "sessionStorage"]) {
  const kept = new Map();
  Object.defineProperty(window, name, {
    value: {
      getItem: (key) => kept.get(key) ?? null,
      setItem: (key, value) => { kept.set(key, String(value)); },
      removeItem: (key) => { kept.delete(key); },
    },
  });
}
