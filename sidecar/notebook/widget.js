// The anywidget around the frame: it shows the document, and keeps `pinned` the same on both ends.

function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: 100%; height: ${model.get("height")}px; border: 1px solid #8884; border-radius: 6px; display: block`;
  frame.title = "One request, token by token";
  frame.srcdoc = model.get("document");
  const send = (message) => frame.contentWindow?.postMessage(message, "*");
  const dark = () => document.body.dataset.jpThemeLight === "false" || document.documentElement.dataset.theme === "dark";
  const pin = () => send({ attn: "pin", index: model.get("pinned") });
  const heard = ({ data, source }) => {
    if (source !== frame.contentWindow || data?.attn !== "pinned") return;
    if (model.get("pinned") === data.index) return;
    model.set("pinned", data.index);
    model.save_changes();
  };
  window.addEventListener("message", heard);
  model.on("change:pinned", pin);
  frame.addEventListener("load", () => send({ attn: "theme", theme: dark() ? "dark" : "light" }));
  el.append(frame);
  return () => {
    window.removeEventListener("message", heard);
    model.off("change:pinned", pin);
  };
}

export default { render };
