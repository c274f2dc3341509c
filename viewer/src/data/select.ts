/** `program.select`: `path :: operation :: phase`, the same wildcards and the same meaning. */

import { PHASES, PROGRAM, type Program } from "./program";

export class NotAPattern extends Error {}

interface Wanted {
  path: string[] | null;
  index: number | null;
  type: RegExp | null;
  operation: RegExp | null;
  phase: number | null;
}

/** Whether a text is meant as a pattern, and not as a word to look for. */
export function isPattern(text: string): boolean {
  return text.includes("::") || text.startsWith("type=") || /[*?[]/.test(text);
}

export function select(program: Program, text: string): number[] {
  const wanted = parse(program, text);
  const fits = callTest(program, wanted);
  const found: number[] = [];
  const byTarget = new Map<string, boolean>();
  for (let node = 0; node < program.names.length; node += 1) {
    if (wanted.phase !== null && program.phases[node] !== wanted.phase) continue;
    if (!program.isOperation(node)) continue;
    const target = program.target(node);
    if (!byTarget.has(target)) byTarget.set(target, isOperation(target, wanted.operation));
    if (byTarget.get(target) && (fits === null || program.callsOf(node).some((call) => fits[call]))) found.push(node);
  }
  return found;
}

function parse(program: Program, text: string): Wanted {
  const parts = text.split("::").map((part) => part.trim());
  if (parts.length > 3 || !text.trim()) throw new NotAPattern("write path :: operation :: phase");
  const phases: readonly string[] = PHASES;
  if (parts.length === 2 && phases.includes(parts[1]!)) parts.splice(1, 0, "");
  const [path = "", operation = "", phase = ""] = parts;
  if (phase && !phases.includes(phase)) throw new NotAPattern(`the phases are ${PHASES.join(", ")}`);
  const type = path.startsWith("type=") ? path.slice("type=".length) : null;
  const [name, index] = numbered(program, type === null ? path : "");
  return {
    path: name && name !== "**" ? name.split(".") : null,
    index,
    type: type === null ? null : glob(type),
    operation: operation && operation !== "*" ? glob(operation) : null,
    phase: phase ? phases.indexOf(phase) : null,
  };
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

function callTest(program: Program, wanted: Wanted): boolean[] | null {
  if (wanted.path === null && wanted.index === null && wanted.type === null) return null;
  const paths = new Map<string, boolean>();
  const fitsPath = (path: string): boolean => {
    if (!paths.has(path)) paths.set(path, matches(wanted.path ?? ["**"], path ? path.split(".") : []));
    return paths.get(path)!;
  };
  const isMeant = (call: number): boolean => {
    const path = program.paths[call]!;
    if (wanted.type !== null) return call !== PROGRAM && wanted.type.test(program.types[call]!);
    if (wanted.index === null) return prefixes(path).some(fitsPath);
    const site = program.sites[call]!;
    const index = site === path ? 0 : Number(site.slice(path.length + 1));
    return call !== PROGRAM && index === wanted.index && fitsPath(path);
  };
  const found: boolean[] = [];
  program.parents.forEach((parent, call) => found.push(call !== PROGRAM && (isMeant(call) || found[parent]!)));
  return found;
}

function prefixes(path: string): string[] {
  const segments = path ? path.split(".") : [];
  return ["", ...segments.map((_, at) => segments.slice(0, at + 1).join("."))];
}

function matches(pattern: string[], path: string[]): boolean {
  if (!pattern.length) return !path.length;
  const [first, ...rest] = pattern;
  if (first === "**") return path.some((_, at) => matches(rest, path.slice(at))) || matches(rest, []);
  return path.length > 0 && glob(first!).test(path[0]!) && matches(rest, path.slice(1));
}

const globs = new Map<string, RegExp>();

/** `*`, `?`, `[abc]` and `[!abc]`, as in Python's fnmatch. */
export function glob(pattern: string): RegExp {
  const known = globs.get(pattern);
  if (known) return known;
  const source = pattern.replace(/\[(!?)([^\]]+)\]|[\s\S]/g, (letter, not: string | undefined, set: string | undefined) => {
    if (set !== undefined) return `[${not ? "^" : ""}${set.replace(/[\\^]/g, "\\$&")}]`;
    if (letter === "*") return "[\\s\\S]*";
    if (letter === "?") return "[\\s\\S]";
    return letter.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");
  });
  const made = new RegExp(`^(?:${source})$`);
  globs.set(pattern, made);
  return made;
}
