// How wide texts are in a font, each measured once.

const PADDING = 2;

/** @returns {(text: string) => number} pixels of a token with its padding */
export function measureIn(font) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = font;
  const known = new Map();
  return (text) => {
    let width = known.get(text);
    if (width === undefined) {
      width = pen.measureText(text).width + PADDING;
      known.set(text, width);
    }
    return width;
  };
}
