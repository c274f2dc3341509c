/** What boxes and rows are coloured by, and how strong the colour of a number is. */

import { micro, scaled } from "./data/numbers";
import type { Program } from "./data/program";

export type Metric = "bytes" | "flops" | "time" | "values" | "none";

interface Meaning {
  label: string;
  /** Columns of the tree whose sum it is. */
  columns: string[];
  of: (program: Program, node: number) => number | null;
  text: (value: number) => string;
  /** Whether the numbers of several nodes add up; of others the largest counts. */
  adds: boolean;
}

const FLOPS = ["forward_flops", "backward_flops", "recomputed_flops", "optimizer_flops"];

export const METRICS: Record<Exclude<Metric, "none">, Meaning> = {
  bytes: {
    label: "bytes moved",
    columns: ["bytes_moved"],
    of: (program, node) => program.moved(node),
    text: (value) => scaled(value, "B"),
    adds: true,
  },
  flops: {
    label: "FLOPs",
    columns: FLOPS,
    of: (program, node) => program.costs.flops[node]!,
    text: (value) => scaled(value, "FLOPs"),
    adds: true,
  },
  time: {
    label: "time, at least",
    columns: ["microseconds"],
    of: (program, node) => program.costs.seconds[node]!,
    text: micro,
    adds: true,
  },
  values: {
    label: "your values",
    columns: [],
    of: (program, node) => program.values?.[node] ?? null,
    text: (value) => String(Number(value.toPrecision(4))),
    adds: false,
  },
};

/** What this data can be coloured by. */
export function available(programs: Program[]): Metric[] {
  const found: Metric[] = ["bytes", "flops"];
  if (programs.some((program) => program.device)) found.push("time");
  if (programs.some((program) => program.values)) found.push("values");
  return [...found, "none"];
}

/** The number of several nodes together; null where none of them has one. */
export function together(metric: Metric, program: Program, nodes: Iterable<number>): number | null {
  if (metric === "none") return null;
  const { of, adds } = METRICS[metric];
  let found: number | null = null;
  for (const node of nodes) {
    const value = of(program, node);
    if (value !== null) found = found === null ? value : adds ? found + value : Math.max(found, value);
  }
  return found;
}

/** From 0 to 1: what is a hundred times smaller than the largest is a tenth as strong. */
export function strength(value: number | null, range: [number, number]): number {
  if (value === null || range[1] <= range[0]) return 0;
  return Math.sqrt((value - range[0]) / (range[1] - range[0]));
}

export function rangeOf(values: (number | null)[]): [number, number] {
  const known = values.filter((value) => value !== null);
  return [Math.min(0, ...known), Math.max(0, ...known)];
}
