/** What is chosen on the page, and the address that says it. */

import type { Metric } from "./colours";
import type { Item, Tree } from "./data/items";
import { OUTER, PROGRAM } from "./data/program";

export interface State {
  /** The call whose graph is open. */
  item: Item | null;
  /** Which program a chosen node is of, and its number. */
  node: { side: number; at: number } | null;
  metric: Metric;
}

/** `#call=blocks.3.mlp&node=addmm_4`, `graph=true_graph_0` where a nested graph is open; the second program's nodes are `other=1`. */
export function address(tree: Tree, state: State): string {
  const parts: string[] = [];
  if (state.item) parts.push(`call=${encoded(callName(state.item))}`);
  if (state.item) parts.push(...graphNames(tree, state.item).map((name) => `graph=${encoded(name)}`));
  if (state.node) parts.push(`node=${encoded(tree.programs[state.node.side]!.fullName(state.node.at))}`);
  if (state.node?.side) parts.push("other=1");
  return parts.length ? `#${parts.join("&")}` : "";
}

/** What an address opens, and the name in it that nothing has. */
export function read(tree: Tree, hash: string): Pick<State, "item" | "node"> & { missing: string | null } {
  const given = new Map(hash.replace(/^#/, "").split("&").map((part) => split(part)));
  const side = given.get("other") === "1" && tree.programs.length > 1 ? 1 : 0;
  const at = tree.programs[side]!.byName.get(given.get("node") ?? "");
  const node = at === undefined ? null : { side, at };
  const item = named(tree, side, given.get("call"));
  const missing = (node ? null : given.get("node")) || (item ? null : given.get("call")) || null;
  return { item: within(tree, item, given.get("graph")) ?? (node && tree.home(node.side, node.at)), node, missing };
}

/** The nested graph in which an item is, by the full name of the node that holds it; none for a call of the program. */
function graphNames(tree: Tree, item: Item): string[] {
  const side = item.graphs[0] >= 0 ? 0 : 1;
  return item.graphs[side]! === OUTER ? [] : [tree.programs[side]!.fullName(item.graphs[side]!)];
}

/** The same call in a nested graph. */
function within(tree: Tree, item: Item | null, graph: string | undefined): Item | null {
  if (item === null || graph === undefined) return item;
  for (const side of [0, 1]) {
    const [holder, call] = [tree.programs[side]?.byName.get(graph), item.calls[side]!];
    if (holder !== undefined && call >= 0 && tree.programs[side]!.holds(holder)) return tree.of(side, call, holder) ?? tree.graphOf(side, holder);
  }
  return item;
}

function callName(item: Item): string {
  if (item.isGraph) return callName(item.parent!);
  return item.calls.includes(PROGRAM) ? "(program)" : item.site || "(root)";
}

function named(tree: Tree, side: number, name: string | undefined): Item | null {
  if (name === undefined) return null;
  if (name === "(program)") return tree.root;
  const site = name === "(root)" ? "" : name;
  return tree.bySiteName(side, site) ?? tree.bySiteName(1 - side, site) ?? null;
}

function encoded(text: string): string {
  return encodeURIComponent(text);
}

function split(part: string): [string, string] {
  const at = part.indexOf("=");
  return [part.slice(0, Math.max(at, 0)), decoded(part.slice(at + 1))];
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch (error) {
    if (error instanceof URIError) return text;
    throw error;
  }
}
