/** What is known of one node, or of one call. */

import type { Item, Tree } from "../data/items";
import type { Pass } from "../data/load";
import { counted, micro, scaled, times } from "../data/numbers";
import { OUTER, PHASES, PROGRAM, QUALITIES, REFERENCE, type Program } from "../data/program";
import { el, link, type Child } from "../dom";
import { cellText, figuresOf } from "./columns";

const MOST = 24;
const MEANINGS: Record<string, string> = {
  exact: "seen while recording",
  accumulated: "a sum of the gradients of several users, all of whom are named",
  inferred: "deduced by a rule",
  none: "not known",
};

export interface CardActions {
  open: (item: Item) => void;
  node: (side: number, at: number) => void;
  close: () => void;
}

export class CardView {
  readonly element = el("aside", { class: "card", attributes: { "aria-label": "what is chosen" } });

  constructor(
    private readonly tree: Tree,
    private readonly actions: CardActions,
  ) {}

  showNode(side: number, at: number): void {
    const program = this.tree.programs[side]!;
    const cost = program.costs;
    this.element.replaceChildren(
      this.title(program.names[at]!, program.target(at)),
      this.expression(side, at),
      rows([
        ["makes", el("code", {}, program.made(at))],
        ["phase", this.phase(program, at)],
        ["call", this.list(program.callsOf(at).map((call) => this.call(side, call)), "outside any module")],
        ["origin", this.quality(program, at)],
        ["line", source(program.source(at))],
        ["in the graph", program.owners[at] !== OUTER && this.graph(side, program.owners[at]!)],
        ["graphs", this.list(this.held(program, at).map((node) => this.graph(side, node)))],
        ["pass", program.passes(at).join(", ")],
        [program.phases[at] === 1 ? "gradient of" : "forward", program.forwards[at]! >= 0 && this.link(side, program.forwards[at]!)],
        ["backward", this.list(program.differentiating(at).map((each) => this.link(side, each)))],
        ["input", this.input(program, at)],
        ["output", this.list(program.outputs(at).map((each) => `${each.kind} ${each.path}`))],
        ["FLOPs", cost.flops[at] ? scaled(cost.flops[at]!) : ""],
        ["reads, writes", program.moved(at) ? `${scaled(cost.read[at]!, "B")}, ${scaled(cost.written[at]!, "B")}` : ""],
        ["time, at least", cost.seconds[at] ? micro(cost.seconds[at]!) : ""],
        ["your value", program.values?.[at] ?? ""],
        ["kept", this.kept(side, at)],
        ["alive then", program.alive.has(at) ? scaled(program.alive.get(at)!, "B") : ""],
      ]),
      this.section("inputs", side, program.readsOf(at)),
      this.section("users", side, program.usersOf(at)),
    );
  }

  showCall(item: Item): void {
    const figures = figuresOf(this.tree, "values").filter((figure) => figure.key !== "values");
    const texts = figures.map((figure): [string, Child] => [figure.head, cellText(this.tree, item, figure)]);
    filled(this.element,
      this.title(item.name, item.depth ? item.type : ""),
      rows(texts),
      ...this.running(item),
      ...(item.isGraph ? [] : this.changes(item)),
      ...(item.calls[0] >= 0 && item.graphs[0] === OUTER ? this.largest(0, item.calls[0]) : []),
      ...(item.depth === 0 ? this.about() : []),
      item.depth > 0 && el("p", { class: "faint" }, "Click an operation for where it comes from, or a call to see inside."),
    );
  }

  private about(): HTMLElement[] {
    const [program] = this.tree.programs as [Program];
    const notes = program.notes.split("\n").filter(Boolean);
    const texts = [`Captured with PyTorch ${program.torch}`, ...notes].map((text) => el("p", { class: "faint" }, text));
    return [...this.tree.programs.flatMap((each, side) => this.history(each, side)), ...texts];
  }

  /** The passes that a program went through, and what each changed. */
  private history(program: Program, side: number): HTMLElement[] {
    if (!program.history.length) return [];
    const which = this.tree.programs.length > 1 ? `history of the ${side ? "second" : "first"} ` : "history ";
    const items = program.history.map((pass) => el("li", {}, passed(pass)));
    return [el("section", { class: "history" }, el("h3", {}, which, el("span", { class: "faint" }, String(items.length))), el("ol", {}, ...items))];
  }

  private title(name: string, kind: string): HTMLElement {
    const close = el("button", { class: "tool", title: "close (Esc)", attributes: { type: "button", "aria-label": "close" }, onclick: () => this.actions.close() }, "×");
    return el("header", {}, el("h2", { title: name }, name), close, kind && el("p", { class: "kind" }, kind));
  }

  /** The call as code, with the values it reads as links. */
  private expression(side: number, at: number): HTMLElement | string {
    const program = this.tree.programs[side]!;
    const pieces = program.expression(at).split(REFERENCE);
    if (!program.isOperation(at) || pieces.join("") === "") return "";
    const reads = program.references(at);
    const parts = pieces.flatMap((piece, k): Child[] => (k < reads.length ? [piece, this.link(side, reads[k]!, false)] : [piece]));
    return el("p", { class: "expression" }, `${program.short(at)}(`, ...parts, ")");
  }

  private phase(program: Program, at: number): string {
    return PHASES[program.phases[at]!]! + (program.recomputed.has(at) ? ", recomputed by a checkpoint" : "");
  }

  private quality(program: Program, at: number): HTMLElement {
    const quality = QUALITIES[program.qualities[at]!]!;
    return el("span", {}, el("span", { class: `quality ${quality}` }, quality), el("span", { class: "faint" }, ` ${MEANINGS[quality]}`));
  }

  private input(program: Program, at: number): string {
    const input = program.input(at);
    if (!input) return "";
    const aliases = input.aliases.length ? `, also ${input.aliases.join(", ")}` : "";
    return `${input.kind} ${input.path}${aliases}${input.of ? `, of ${input.of}` : ""}`;
  }

  private kept(side: number, at: number): Child {
    const program = this.tree.programs[side]!;
    const kept = program.keptBy(at);
    if (!kept || program.phases[at] !== 0) return "";
    return el("span", {}, `${scaled(kept.bytes, "B")}: ${kept.reads}, in `, this.link(side, kept.consumer, false));
  }

  /** The graphs that a node holds or is given. */
  private held(program: Program, at: number): number[] {
    return [at, ...program.readsOf(at)].filter((node) => program.holds(node));
  }

  private graph(side: number, node: number): HTMLElement {
    const item = this.tree.graphOf(side, node);
    return link(item.name, () => this.actions.open(item), item.type);
  }

  /** The operations that a nested graph is given to. */
  private running(item: Item): HTMLElement[] {
    if (!item.isGraph) return [];
    const side = item.calls[0] >= 0 ? 0 : 1;
    const users = this.tree.programs[side]!.usersOf(item.graphs[side]!);
    return users.length ? [rows([["is run by", this.list(users.map((user) => this.link(side, user)))]])] : [];
  }

  private call(side: number, call: number): HTMLElement {
    const item = this.tree.of(side, call);
    return link(item.name, () => this.actions.open(item), item.type);
  }

  private link(side: number, at: number, isDescribed = true): HTMLElement {
    const program = this.tree.programs[side]!;
    const name = link(program.names[at]!, () => this.actions.node(side, at), program.target(at));
    return isDescribed ? el("span", { class: "described" }, name, el("code", { class: "faint" }, ` ${program.made(at)}`)) : name;
  }

  private list(parts: Child[], empty = ""): Child {
    if (!parts.length) return empty;
    return el("span", { class: "several" }, ...parts.slice(0, MOST).map((part) => el("span", {}, part)), parts.length > MOST && el("span", { class: "faint" }, `and ${parts.length - MOST} more`));
  }

  private section(title: string, side: number, nodes: number[]): HTMLElement | string {
    if (!nodes.length) return "";
    const items = nodes.slice(0, MOST).map((node) => el("li", {}, this.link(side, node)));
    const more = nodes.length > MOST && el("li", { class: "faint" }, `and ${times(nodes.length - MOST, "more", "more")}`);
    return el("section", {}, el("h3", {}, `${title} `, el("span", { class: "faint" }, String(nodes.length))), el("ul", {}, ...items, more));
  }

  /** The largest values that the backward keeps of a call. */
  private largest(side: number, call: number): HTMLElement[] {
    const program = this.tree.programs[side]!;
    const inside = [...program.kept.values()].filter((kept) => program.places[kept.node]! >= call && program.places[kept.node]! < program.ends[call]!);
    if (!inside.length) return [];
    inside.sort((a, b) => b.bytes - a.bytes || a.node - b.node);
    const items = inside.slice(0, 8).map((kept) => el("li", { class: "kept-row" }, this.link(side, kept.node), el("span", { class: "number" }, scaled(kept.bytes, "B"))));
    return [el("section", {}, el("h3", {}, "kept for the backward ", el("span", { class: "faint" }, String(inside.length))), el("ul", {}, ...items))];
  }

  private changes(item: Item): HTMLElement[] {
    const { difference } = this.tree;
    if (!difference) return [];
    const site = item.calls.includes(PROGRAM) ? "" : item.site;
    const lines: HTMLElement[] = [];
    if (item.mark === "came") lines.push(line("added", "+", "a call that only the second has"));
    if (item.mark === "gone") lines.push(line("removed", "−", "a call that only the first has"));
    for (const [where, before, now] of difference.retyped) if (where === site && site) lines.push(line("moved", "~", `${before}, now ${now}`));
    for (const row of difference.rows.filter((each) => each.calls.includes(site))) {
      for (const [[name, was, now], count] of row.changed) lines.push(line("moved", "~", `${name} ${was}, now ${now}${count > 1 ? ` × ${count}` : ""}`, row.phase));
      for (const [kind, sign] of [["added", "+"], ["removed", "−"], ["moved", "~"]] as const)
        for (const [[name, made], count] of row[kind]) lines.push(line(kind, sign, `${name} ${made}${count > 1 ? ` × ${count}` : ""}`, row.phase));
    }
    if (item.depth === 0) for (const row of [...difference.inputs, ...difference.outputs].slice(0, 200)) lines.push(line(row.startsWith("+") ? "added" : "removed", row[0]!, row.slice(2)));
    const none = difference.ok ? "The same calls, operations and signature." : item.mark === "inside" ? "The same itself; calls inside differ." : "No difference here.";
    return [el("section", {}, el("h3", {}, "differences"), lines.length ? el("ul", { class: "changes" }, ...lines) : el("p", { class: "faint" }, none))];
  }
}

/** A pass that opens to what it changed, by operator; `edited` are those with other arguments. */
function passed(pass: Pass): HTMLElement {
  const counts = `${counted(pass.removed)} gone, ${counted(pass.added)} new${pass.edited ? `, ${counted(pass.edited)} edited` : ""}`;
  const lines = pass.changes.flatMap(({ operator, calls, ...counts }) =>
    ([["added", "+"], ["removed", "−"], ["edited", "~"]] as const)
      .filter(([kind]) => counts[kind])
      .map(([kind, sign]) => line(kind === "edited" ? "moved" : kind, sign, `${operator}${counts[kind] > 1 ? ` × ${counted(counts[kind])}` : ""}`, within(calls))),
  );
  return el("details", {}, el("summary", { title: pass.options }, pass.name, el("span", { class: "faint" }, ` ${counts}`)), el("ul", { class: "changes" }, ...lines));
}

function within(calls: string[]): string {
  const shown = calls.slice(0, 4).map((call) => call || "(root)");
  return `in ${shown.join(", ")}${calls.length > shown.length ? ` and ${calls.length - shown.length} more` : ""}`;
}

function filled(element: HTMLElement, ...children: Child[]): void {
  const shown = children.filter((child): child is Node | string => child instanceof Node || (typeof child === "string" && child !== ""));
  element.replaceChildren(...shown);
}

function line(kind: string, sign: string, text: string, phase = ""): HTMLElement {
  return el("li", { class: kind }, el("span", { class: "sign" }, sign), el("code", {}, text), phase && el("span", { class: "faint" }, ` ${phase}`));
}

function rows(pairs: [string, Child][]): HTMLElement {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== false);
  return el("dl", {}, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** The last two folders of a line of code; the whole path where the pointer rests. */
function source(text: string): Child {
  if (!text) return "";
  const [place = "", where = ""] = text.split(" in ");
  const short = place.split(/[\\/]/).slice(-2).join("/");
  return el("span", { title: text }, el("code", {}, short), where && el("span", { class: "faint" }, ` in ${where}`));
}
