// The chosen theme, before anything is painted: a module would come too late.
try {
  const theme = localStorage.getItem("attn.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is forbidden to this page: the theme is that of the system.
}
