/** The columns of the tree: a figure of each call, as `whence report` has them. */

import { METRICS, type Metric } from "../colours";
import type { Item, Tree } from "../data/items";
import { counted, micro, scaled } from "../data/numbers";
import { OUTER, type Program } from "../data/program";

export interface Figure {
  key: string;
  head: string;
  hint: string;
  of: (program: Program, call: number, graph: number) => number;
  text: (value: number) => string;
}

const COUNTS = new Set(["forward", "backward", "optimizer", "parameters"]);
const HINTS: Record<string, string> = {
  forward: "operations of the forward in this call and in those inside it",
  backward: "operations of its backward",
  optimizer: "operations that update its parameters",
  parameters: "numbers that it trains, shared ones once",
  bytes_moved: "bytes that its operations read and write, each by itself",
  intensity: "FLOPs for each byte that is read or written",
  kept_bytes: "bytes of activations that the backward keeps of its forward",
  kept_of_unknown_size: "values kept of which nobody knows the size: workspaces of kernels",
  recomputing_saves: "bytes kept less if this call alone were in a checkpoint; more, below zero",
  recomputing_flops: "FLOPs that it would compute again then",
  microseconds: "what a named device takes at least, by a roofline",
};
const UNSHOWN = new Set(["parameter_bytes", "bytes_read", "bytes_written"]);

export function figuresOf(tree: Tree, metric: Metric): Figure[] {
  const keys = [...new Set(tree.programs.flatMap((program) => Object.keys(program.figures)))];
  const found = keys.filter((key) => !UNSHOWN.has(key) && tree.programs.some((program) => used(program, key))).map(figure);
  return metric === "values" ? [...found, ownValues()] : found;
}

function used(program: Program, key: string): boolean {
  return program.figures[key]?.some((value) => value !== 0) ?? false;
}

function figure(key: string): Figure {
  const head = key.replaceAll("_", " ").replace("flops", "FLOPs").replace("microseconds", "time");
  const text = key === "microseconds" ? (value: number) => micro(value / 1e6) : COUNTS.has(key) ? counted : scaled;
  const hint = HINTS[key] ?? "floating-point operations, a multiplication and an addition being two";
  return { key, head, hint, of: (program, call, graph) => (graph === OUTER ? program.figures[key]?.[call] : program.figuresOf(call, graph)[key]) ?? 0, text };
}

function ownValues(): Figure {
  const { label, text, of } = METRICS.values;
  const known = new WeakMap<Program, number[]>();
  const largest = (program: Program): number[] => {
    const found = program.parents.map(() => Number.NEGATIVE_INFINITY);
    program.places.forEach((place, node) => (found[place] = Math.max(found[place]!, of(program, node) ?? Number.NEGATIVE_INFINITY)));
    for (let call = found.length - 1; call > 0; call -= 1) found[program.parents[call]!] = Math.max(found[program.parents[call]!]!, found[call]!);
    return found.map((value) => (Number.isFinite(value) ? value : 0));
  };
  const column = (program: Program): number[] => known.get(program) ?? known.set(program, largest(program)).get(program)!;
  return { key: "values", head: label, hint: "the largest of yours in this call", of: (program, call, graph) => (graph === OUTER ? column(program)[call]! : 0), text };
}

/** What a row says of a figure: one number, or both where two programs differ. */
export function cellText(tree: Tree, item: Item, figure: Figure): string {
  const values = item.calls.flatMap((call, side) => (call < 0 || side >= tree.programs.length ? [] : [figure.of(tree.programs[side]!, call, item.graphs[side]!)]));
  const texts = values.map((value) => (value ? figure.text(value) : ""));
  if (texts.length < 2 || texts[0] === texts[1]) return texts[0]!;
  return `${texts[0] || "0"} → ${texts[1] || "0"}`;
}

/** The number by which a row is coloured. */
export function heatOf(tree: Tree, item: Item, metric: Metric, figures: Figure[]): number {
  if (metric === "none") return 0;
  const keys = metric === "values" ? ["values"] : METRICS[metric].columns;
  const side = item.calls[0] >= 0 ? 0 : 1;
  return figures.filter((each) => keys.includes(each.key)).reduce((sum, each) => sum + each.of(tree.programs[side]!, item.calls[side]!, item.graphs[side]!), 0);
}
