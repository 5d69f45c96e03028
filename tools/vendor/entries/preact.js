// Preact, its hooks, htm and signals share state, so they are one module.
import { h } from "preact";
import htm from "htm";

export {
  Component, Fragment, cloneElement, createContext, createRef, h, hydrate, isValidElement, options,
  render, toChildArray,
} from "preact";
export {
  useCallback, useContext, useDebugValue, useEffect, useErrorBoundary, useId, useImperativeHandle,
  useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "preact/hooks";
export {
  batch, computed, effect, signal, Signal, untracked, useComputed, useSignal, useSignalEffect,
} from "@preact/signals";
export const html = htm.bind(h);
