// Data of a component: loaded, loaded again when its inputs change, and when the connection is back.

import { useEffect, useRef, useState } from "../../vendor/preact.js";
import { ApiError } from "../api.js";
import { connection } from "../state.js";

/**
 * @template T
 * @param {((signal: AbortSignal) => Promise<T>) | null} load null: nothing is loaded
 * @param {any[]} inputs of `load`
 * @param {{every?: number, keep?: boolean}} options every: milliseconds until it is loaded again;
 *   keep: what was loaded stays while other inputs are loaded
 * @returns {{data: T | null, error: Error | null, isLoading: boolean, reload: () => void}}
 */
export function useLoaded(load, inputs, { every = 0, keep = false } = {}) {
  const [state, setState] = useState({ data: null, error: null, isLoading: !!load });
  const [tries, setTries] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const isLost = connection.value.state === "lost";
  useEffect(() => {
    if (!load) {
      setState({ data: null, error: null, isLoading: false });
      return undefined;
    }
    const ending = new AbortController();
    let timer = 0;
    setState((before) => ({ data: keep ? before.data : null, error: null, isLoading: true }));
    const once = async () => {
      try {
        const data = await latest.current(ending.signal);
        if (!ending.signal.aborted) setState({ data, error: null, isLoading: false });
      } catch (error) {
        if (ending.signal.aborted) return;
        if (!(error instanceof ApiError)) console.error(error);
        setState((before) => ({ data: before.data, error, isLoading: false }));
      }
      if (every && !ending.signal.aborted) timer = setTimeout(again, every);
    };
    // A page that nobody sees asks nothing.
    const again = () => { if (document.hidden) timer = setTimeout(again, every); else once(); };
    once();
    return () => { ending.abort(); clearTimeout(timer); };
  }, [...inputs, tries, !load]);
  useEffect(() => {
    if (!isLost && state.error?.status === 0) setTries(tries + 1);
  }, [isLost]);
  return { ...state, reload: () => setTries((n) => n + 1) };
}
