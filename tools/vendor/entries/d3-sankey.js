export * from "d3-sankey";
