/** Look for calls and operations by a word, or select them by a pattern as `program.select` does. */

import type { Item, Tree } from "../data/items";
import { times } from "../data/numbers";
import { OUTER, PHASES } from "../data/program";
import { isPattern, NotAPattern, select } from "../data/select";
import { el } from "../dom";

const [MOST_CALLS, MOST_NODES] = [40, 200];

type Hit = { item: Item } | { side: number; at: number };

export interface SearchActions {
  open: (item: Item) => void;
  node: (side: number, at: number) => void;
  leave: () => void;
}

export class SearchView {
  readonly element: HTMLElement;
  private readonly field: HTMLInputElement;
  private readonly list = el("div", { class: "hits", attributes: { role: "listbox", id: "hits" } });
  private hits: Hit[] = [];
  private cursor = 0;

  constructor(
    private readonly tree: Tree,
    private readonly actions: SearchActions,
  ) {
    this.field = el("input", {
      attributes: {
        type: "search",
        placeholder: "Search, or path :: operator :: phase",
        "aria-label": "search names, paths and operators",
        "aria-controls": "hits",
        autocomplete: "off",
        spellcheck: "false",
      },
      oninput: () => this.look(),
      onfocus: () => this.look(),
      onkeydown: (event) => this.key(event),
    });
    this.list.hidden = true;
    this.element = el("div", { class: "search", attributes: { role: "search" } }, this.field, el("kbd", {}, "/"), this.list);
    document.addEventListener("pointerdown", (event) => !this.element.contains(event.target as Node) && this.hide());
  }

  focus(): void {
    this.field.focus();
    this.field.select();
  }

  /** Say what is called so, as if it had been typed. */
  ask(text: string): void {
    this.field.value = text;
    this.look();
  }

  private look(): void {
    const text = this.field.value.trim();
    this.cursor = 0;
    this.hits = [];
    if (!text) return this.hide();
    this.list.hidden = false;
    try {
      this.list.replaceChildren(...(isPattern(text) ? this.selected(text) : this.found(text)));
    } catch (error) {
      if (!(error instanceof NotAPattern)) throw error;
      this.list.replaceChildren(el("p", { class: "empty" }, error.message));
    }
    this.point();
  }

  private selected(text: string): Node[] {
    const nodes = this.tree.programs.flatMap((program, side) => select(program, text).map((at) => ({ side, at })));
    if (!nodes.length) return [el("p", { class: "empty" }, "Nothing fits. Paths start at the root: ", el("code", {}, "**.mlp"), " fits anywhere.")];
    return [this.head(times(nodes.length, this.areInputs(nodes) ? "input" : "operation"), nodes.length > MOST_NODES ? `the first ${MOST_NODES}` : ""), ...nodes.slice(0, MOST_NODES).map((hit) => this.node(hit))];
  }

  private areInputs(hits: { side: number; at: number }[]): boolean {
    return hits.every(({ side, at }) => this.tree.programs[side]!.input(at));
  }

  private found(text: string): Node[] {
    const word = text.toLowerCase();
    const items: Item[] = [];
    const visit = (item: Item): void => {
      if (item.name.toLowerCase().includes(word) || item.type.toLowerCase().includes(word)) items.push(item);
      item.children.forEach(visit);
    };
    visit(this.tree.root);
    const nearness = (item: Item): number => (item.name.toLowerCase() === word ? 2 : last(item.name) === word ? 1 : 0);
    items.sort((a, b) => nearness(b) - nearness(a));
    const nodes = this.tree.programs.flatMap((program, side) => {
      const fits = new Map<string, boolean>();
      const found: { side: number; at: number }[] = [];
      program.names.forEach((name, at) => {
        const target = program.target(at);
        if (!fits.has(target)) fits.set(target, program.isOperation(at) && target.toLowerCase().includes(word));
        if (program.op(at) !== "output" && (fits.get(target) || name.toLowerCase().includes(word) || program.input(at)?.path.toLowerCase().includes(word)))
          found.push({ side, at });
      });
      return found.sort((a, b) => Number(program.names[b.at] === text) - Number(program.names[a.at] === text));
    });
    if (!items.length && !nodes.length) return [el("p", { class: "empty" }, "Nothing is called so: no call, no class, no node, no operator.")];
    return [
      ...(items.length ? [this.head(times(items.length, "call"), items.length > MOST_CALLS ? `the first ${MOST_CALLS}` : "")] : []),
      ...items.slice(0, MOST_CALLS).map((item) => this.call(item)),
      ...(nodes.length ? [this.head(times(nodes.length, "node"), nodes.length > MOST_NODES ? `the first ${MOST_NODES}` : "")] : []),
      ...nodes.slice(0, MOST_NODES).map((hit) => this.node(hit)),
    ];
  }

  private head(text: string, more: string): HTMLElement {
    return el("p", { class: "hits-head" }, text, more && el("span", { class: "faint" }, `, ${more}`));
  }

  private call(item: Item): HTMLElement {
    return this.hit({ item }, el("span", {}, item.name), el("span", { class: "faint" }, item.depth ? item.type : ""));
  }

  private node(hit: { side: number; at: number }): HTMLElement {
    const program = this.tree.programs[hit.side]!;
    const where = program.callsOf(hit.at).map((call) => program.label(call)).join(" + ");
    const isInput = program.op(hit.at) === "placeholder";
    const owner = program.owners[hit.at]!;
    const inside = owner === OUTER ? "" : `in ${program.fullName(owner)}`;
    const what = isInput ? (program.input(hit.at)?.path ?? inside) : `${program.short(hit.at)} · ${where || "program"} · ${PHASES[program.phases[hit.at]!]}${inside && ` · ${inside}`}`;
    const side = this.tree.programs.length > 1 ? ["first", "second"][hit.side]! : "";
    return this.hit({ ...hit }, el("code", { attributes: { "data-node": program.fullName(hit.at) } }, program.names[hit.at]!), el("span", { class: "faint" }, [side, what].filter(Boolean).join(" · ")));
  }

  private hit(hit: Hit, ...parts: Node[]): HTMLElement {
    const at = this.hits.push(hit) - 1;
    return el("div", { class: "hit", attributes: { role: "option", id: `hit-${at}` }, onclick: () => this.go(at) }, ...parts);
  }

  private go(at: number): void {
    const hit = this.hits[at];
    if (!hit) return;
    this.hide();
    this.field.blur();
    if ("item" in hit) this.actions.open(hit.item);
    else this.actions.node(hit.side, hit.at);
  }

  private hide(): void {
    this.list.hidden = true;
  }

  private point(): void {
    this.list.querySelectorAll(".hit.cursor").forEach((each) => each.classList.remove("cursor"));
    const chosen = this.list.querySelector(`#hit-${this.cursor}`);
    chosen?.classList.add("cursor");
    chosen?.scrollIntoView({ block: "nearest" });
    if (chosen) this.field.setAttribute("aria-activedescendant", chosen.id);
  }

  private key(event: KeyboardEvent): void {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = this.cursor + (event.key === "ArrowDown" ? 1 : -1);
      this.cursor = Math.min(Math.max(next, 0), this.hits.length - 1);
      this.point();
    } else if (event.key === "Enter") this.go(this.cursor);
    else if (event.key === "Escape") {
      this.hide();
      this.field.blur();
      this.actions.leave();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

function last(path: string): string {
  return path.slice(path.lastIndexOf(".") + 1).toLowerCase();
}
