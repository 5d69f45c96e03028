export * from "regl-scatterplot";
export { default } from "regl-scatterplot";
