/** Elements with text. Data of the page is text that somebody else wrote: it becomes text nodes, and nothing else. */

export type Child = Node | string | number | null | undefined | false;
type Handlers = { [K in keyof HTMLElementEventMap as `on${K}`]?: (event: HTMLElementEventMap[K]) => void };
type Options = { class?: string; title?: string; attributes?: Record<string, string | number> } & Handlers;

const SVG = "http://www.w3.org/2000/svg";

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  options: Options = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return filled(document.createElement(tag), options, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  options: Options = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return filled(document.createElementNS(SVG, tag), options, children);
}

function filled<E extends Element>(element: E, options: Options, children: Child[]): E {
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.setAttribute("class", value as string);
    else if (name === "title") titled(element, value as string);
    else if (name === "attributes") for (const [key, text] of Object.entries(value)) element.setAttribute(key, String(text));
    else element.addEventListener(name.slice(2), value as EventListener);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return element;
}

function titled(element: Element, text: string): void {
  if (element.namespaceURI === SVG) element.append(svg("title", {}, text));
  else element.setAttribute("title", text);
}

function asNode(child: Child): Node {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** A button that looks like a link. */
export function link(text: string, onclick: () => void, title = ""): HTMLButtonElement {
  return el("button", { class: "link", title, attributes: { type: "button" }, onclick }, text);
}
