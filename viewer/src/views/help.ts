/** The keys, and what the marks mean. */

import { el } from "../dom";

const KEYS: [string, string][] = [
  ["↑ ↓", "move through the tree, or through the boxes of a graph"],
  ["→ ←", "show or hide the calls and nested graphs inside"],
  ["Enter", "open the graph of a call; in a graph, go inside or show the card"],
  ["x", "show equal calls one by one"],
  ["Backspace", "in a graph: the call around"],
  ["/", "search, or select by path :: operator :: phase"],
  ["+ − f", "zoom, or show all of a graph (Ctrl and the wheel zoom, too)"],
  ["m", "show or hide memory over time"],
  ["d", "dark or light"],
  ["Esc", "close what is open"],
  ["?", "this page"],
];

const PATTERNS: [string, string][] = [
  ["blocks.*.mlp", "everything in these modules"],
  ["** :: aten.mm* :: backward", "an operator in one phase"],
  ["type=Linear", "all modules of a class"],
  ["lin@1", "the second call of a module"],
  ["region=gate", "what ran in a region, or is annotated so"],
  ["layers.0 :: kind=parameter", "inputs: user, parameter, buffer, constant, …"],
  [":: saved", "also loss, recomputed, random"],
];

export function helpView(): HTMLDialogElement {
  const dialog = el("dialog", { class: "help", onclick: (event) => event.target === dialog && dialog.close() });
  dialog.append(
    el(
      "div",
      {},
      el("h2", {}, "Keys"),
      el("dl", {}, ...KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
      el("h2", {}, "Patterns"),
      el("dl", {}, ...PATTERNS.flatMap(([pattern, what]) => [el("dt", {}, el("code", {}, pattern)), el("dd", {}, what)])),
      el("p", { class: "faint" }, "In a graph the forward goes down and the backward goes up; lines between them are values that the backward reads. The page needs no network, and sends nothing."),
    ),
  );
  return dialog;
}
