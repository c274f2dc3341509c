/** How long it takes until what was done can be seen; benchmarks read the measures. */

/** Do something after what is there now has been painted. */
export function painted(then: () => void): void {
  requestAnimationFrame(() => setTimeout(then));
}

export function measured(detail: string, work: () => void): void {
  const start = performance.now();
  work();
  painted(() => performance.measure("open", { start, detail }));
}
