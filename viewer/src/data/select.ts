/** `program.select`: `path :: operation :: phase`, the same words, wildcards and meaning. */

import { glob } from "./glob";
import { OUTER, PHASES, PROGRAM, type Program } from "./program";

export class NotAPattern extends Error {}

interface Wanted {
  path: string[] | null;
  index: number | null;
  type: RegExp | null;
  /** A key of annotations, and what it says. */
  said: [string, RegExp] | null;
  operation: RegExp | null;
  phase: number | null;
  /** Of the loss, recomputed, saved, random. */
  mark: string | null;
  /** The kind of inputs, which are meant then in the place of operations. */
  kind: string | null;
}

type Test = ((node: number) => boolean) | null;

const [TYPE, KIND] = ["type=", "kind="];
const SAID = /^([\p{L}\p{N}_]+)=([\s\S]*)$/u;

/** Whether a text is meant as a pattern, and not as a word to look for. */
export function isPattern(text: string): boolean {
  return text.includes("::") || SAID.test(text) || /[*?[]|@\d+$/.test(text);
}

export function select(program: Program, text: string): number[] {
  const wanted = parse(program, text);
  if (wanted.kind !== null) return inputs(program, wanted);
  const fits = placeTest(program, wanted);
  const marked = wanted.mark === null ? null : program.marks.get(wanted.mark)!;
  const found: number[] = [];
  const byTarget = new Map<string, boolean>();
  for (let node = 0; node < program.names.length; node += 1) {
    if (wanted.phase !== null && program.phases[node] !== wanted.phase) continue;
    if ((marked && !marked.has(node)) || !program.isOperation(node)) continue;
    const target = program.target(node);
    if (!byTarget.has(target)) byTarget.set(target, isOperation(target, wanted.operation));
    if (byTarget.get(target) && (fits === null || fits(node))) found.push(node);
  }
  return found;
}

function parse(program: Program, text: string): Wanted {
  const [path, operation, last] = parts(program, text);
  const type = path.startsWith(TYPE) ? path.slice(TYPE.length) : null;
  const said = type === null ? SAID.exec(path) : null;
  const [name, index] = numbered(program, type === null && said === null ? path : "");
  const kind = operation.startsWith(KIND) ? operation.slice(KIND.length) : null;
  if (kind !== null && !program.kinds.includes(kind)) throw new NotAPattern(`the kinds of inputs are ${program.kinds.join(", ")}`);
  const phase = (PHASES as readonly string[]).indexOf(last);
  return {
    path: name && name !== "**" ? name.split(".") : null,
    index,
    type: type === null ? null : glob(type),
    said: said && [said[1]!, glob(said[2]!)],
    operation: operation && operation !== "*" && kind === null ? glob(operation) : null,
    phase: phase < 0 ? null : phase,
    mark: program.marks.has(last) ? last : null,
    kind,
  };
}

/** Its three parts, of which the second may be left out, and the first where a kind of input is meant. */
function parts(program: Program, text: string): [string, string, string] {
  const found = text.split("::").map((part) => part.trim());
  if (found.length > 3 || !text.trim()) throw new NotAPattern("write path :: operation :: phase");
  const isLast = (word: string): boolean => (PHASES as readonly string[]).includes(word) || program.marks.has(word);
  if (found[0]!.startsWith(KIND)) found.unshift("");
  if (found.length === 2 && isLast(found[1]!)) found.splice(1, 0, "");
  const [path = "", operation = "", last = ""] = found;
  if (last && !isLast(last)) throw new NotAPattern(`the phases are ${PHASES.join(", ")}, and ${[...program.marks.keys()].join(", ")} can stand in their place`);
  return [path, operation, last];
}

function numbered(program: Program, path: string): [string, number | null] {
  const at = path.lastIndexOf("@");
  const isName = program.paths.some((known) => known === path || known.startsWith(`${path}.`));
  if (at < 0 || isName) return [path, null];
  if (!/^\d+$/.test(path.slice(at + 1))) throw new NotAPattern("write path@0 for the first call");
  return [path.slice(0, at), Number(path.slice(at + 1))];
}

function isOperation(target: string, wanted: RegExp | null): boolean {
  return wanted === null || wanted.test(target) || wanted.test(target.slice(0, Math.max(0, target.lastIndexOf("."))));
}

/** The inputs of a kind that the modules of a path hold. */
function inputs(program: Program, wanted: Wanted): number[] {
  if (wanted.phase !== null || wanted.mark !== null || wanted.said !== null || wanted.index !== null)
    throw new NotAPattern("inputs have no phase, no call and no annotation");
  const found: number[] = [];
  program.names.forEach((_, node) => {
    const input = program.owners[node] === OUTER ? program.input(node) : undefined;
    if (input?.kind === wanted.kind && isHeld(input, wanted)) found.push(node);
  });
  return found;
}

function isHeld(input: NonNullable<ReturnType<Program["input"]>>, { type, path }: Wanted): boolean {
  if (type !== null) return input.moduleType !== null && type.test(input.moduleType);
  if (path === null) return true;
  return input.isHeld && [input.path, ...input.aliases].some((held) => prefixes(held).some((above) => matches(path, split(above))));
}

function placeTest(program: Program, wanted: Wanted): Test {
  if (wanted.said !== null) return saidTest(program, wanted.said);
  const calls = callTest(program, wanted);
  return calls && ((node) => program.callsOf(node).some((call) => calls[call]));
}

/** What is said of a node, and the regions around the one that it names. */
function saidTest(program: Program, [key, wanted]: [string, RegExp]): Test {
  const rows = (program.said.get(key) ?? []).filter(([text]) => prefixes(text).some((each, at) => (at > 0 || text === "") && wanted.test(each)));
  return (node) => rows.some(([, places]) => places.has(node));
}

function callTest(program: Program, wanted: Wanted): boolean[] | null {
  if (wanted.path === null && wanted.index === null && wanted.type === null) return null;
  const paths = new Map<string, boolean>();
  const fitsPath = (path: string): boolean => {
    if (!paths.has(path)) paths.set(path, matches(wanted.path ?? ["**"], split(path)));
    return paths.get(path)!;
  };
  const isMeant = (call: number): boolean => {
    const path = program.paths[call]!;
    if (wanted.type !== null) return wanted.type.test(program.types[call]!);
    if (wanted.index === null) return prefixes(path).some(fitsPath);
    const site = program.sites[call]!;
    const index = site === path ? 0 : Number(site.slice(path.length + 1));
    return index === wanted.index && fitsPath(path);
  };
  const found: boolean[] = [];
  program.parents.forEach((parent, call) => found.push(call !== PROGRAM && (isMeant(call) || found[parent]!)));
  return found;
}

function split(path: string): string[] {
  return path ? path.split(".") : [];
}

/** The path and every path above it, from the root down. */
function prefixes(path: string): string[] {
  const segments = split(path);
  return ["", ...segments.map((_, at) => segments.slice(0, at + 1).join("."))];
}

function matches(pattern: string[], path: string[]): boolean {
  if (!pattern.length) return !path.length;
  const [first, ...rest] = pattern;
  if (first === "**") return path.some((_, at) => matches(rest, path.slice(at))) || matches(rest, []);
  return path.length > 0 && glob(first!).test(path[0]!) && matches(rest, path.slice(1));
}
