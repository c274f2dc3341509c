/** The tree of calls of one program, or of two at once, with equal neighbours as one row. */

import type { Difference } from "./load";
import { PROGRAM, type Program } from "./program";

export const FOLD_FROM = 3;

export type Mark = "came" | "gone" | "changed" | "inside" | "same";

/** A call: its number in the first program, in the second, or in both; -1 where there is none. */
export interface Item {
  calls: [number, number];
  site: string;
  type: string;
  name: string;
  depth: number;
  parent: Item | null;
  children: Item[];
  mark: Mark;
  /** What equals it among its neighbours has the same; -1 until somebody asks. */
  shape: number;
}

/** Neighbours that are shown as one row: the first of them, how many, the last. */
export interface Run {
  first: Item;
  times: number;
  last: Item;
}

export class Tree {
  readonly root: Item;
  private readonly bySite: Map<string, Item>[] = [new Map(), new Map()];
  private readonly shapes = new Map<string, number>();

  constructor(
    readonly programs: Program[],
    readonly difference: Difference | null,
  ) {
    this.root = this.item([PROGRAM, programs.length > 1 ? PROGRAM : -1], null);
    if (difference) this.marked(difference);
  }

  /** The item of a call of a program. */
  of(side: number, call: number): Item {
    return this.bySite[side]!.get(key(this.programs[side]!, call))!;
  }

  bySiteName(side: number, site: string): Item | undefined {
    return this.bySite[side]?.get(`.${site}`);
  }

  runs(items: Item[]): Run[] {
    const found: Run[] = [];
    let at = 0;
    while (at < items.length) {
      let end = at + 1;
      while (end < items.length && this.shape(items[end]!) === this.shape(items[at]!)) end += 1;
      if (end - at >= FOLD_FROM) found.push({ first: items[at]!, times: end - at, last: items[end - 1]! });
      else for (const each of items.slice(at, end)) found.push({ first: each, times: 1, last: each });
      at = end;
    }
    return found;
  }

  private item(calls: [number, number], parent: Item | null): Item {
    const side = calls[0] >= 0 ? 0 : 1;
    const [program, call] = [this.programs[side]!, calls[side]];
    const site = program.sites[call]!;
    const item: Item = {
      calls,
      site,
      type: program.types[call]!,
      name: call === PROGRAM ? "(program)" : site || "(root)",
      depth: parent === null ? 0 : parent.depth + 1,
      parent,
      children: [],
      mark: "same",
      shape: -1,
    };
    calls.forEach((each, on) => each >= 0 && this.bySite[on]!.set(key(this.programs[on]!, each), item));
    item.children = this.pairs(calls).map((pair) => this.item(pair, item));
    return item;
  }

  /** The calls inside both, by call site: those of the second alone stand where they are there. */
  private pairs(calls: [number, number]): [number, number][] {
    const [first = [], second = []] = calls.map((call, side) => (call < 0 ? [] : this.programs[side]!.children[call]!));
    const sites = first.map((call) => this.programs[0]!.sites[call]!);
    const found: [number, number][] = first.map((call) => [call, -1]);
    let behind = 0;
    for (const call of second) {
      const at = sites.indexOf(this.programs[1]!.sites[call]!);
      if (at >= 0) {
        const place = found.findIndex((pair) => pair[0] === first[at]);
        found[place]![1] = call;
        behind = place + 1;
      } else {
        found.splice(behind, 0, [-1, call]);
        behind += 1;
      }
    }
    return found;
  }

  private marked(difference: Difference): void {
    const retyped = new Set(difference.retyped.map(([site]) => site));
    const changed = new Set(difference.rows.flatMap((row) => row.calls));
    const visit = (item: Item): boolean => {
      const inside = item.children.map(visit).some(Boolean);
      const site = item.calls.includes(PROGRAM) ? "" : item.site;
      const isModule = !item.calls.includes(PROGRAM);
      if (item.calls[0] < 0) item.mark = "came";
      else if (item.calls[1] < 0) item.mark = "gone";
      else if ((isModule && retyped.has(site)) || ((site !== "" || !isModule) && changed.has(site))) item.mark = "changed";
      else if (inside) item.mark = "inside";
      return item.mark !== "same";
    };
    visit(this.root);
  }

  /** A number for what must be equal for two items to be shown as one: everything but their own names. */
  private shape(item: Item): number {
    if (item.shape >= 0) return item.shape;
    const figures = item.calls.map((call, side) =>
      call < 0 ? "" : Object.values(this.programs[side]!.figures).map((column) => column[call]),
    );
    const inside = item.children.map((child) => [last(child.site), this.shape(child)]);
    const text = JSON.stringify([item.type, item.mark, figures, inside]);
    const known = this.shapes.get(text);
    item.shape = known ?? this.shapes.size;
    if (known === undefined) this.shapes.set(text, item.shape);
    return item.shape;
  }
}

/** The program and the module at its root have the same site. */
function key(program: Program, call: number): string {
  return call === PROGRAM ? "" : `.${program.sites[call]!}`;
}

export function last(site: string): string {
  return site.slice(site.lastIndexOf(".") + 1);
}
