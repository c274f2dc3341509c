/** `*`, `?`, `[abc]`, `[a-z]` and `[!abc]`, as in Python's fnmatch: what it takes literally is literal here, too. */

const globs = new Map<string, RegExp>();

export function glob(pattern: string): RegExp {
  const known = globs.get(pattern);
  if (known) return known;
  const made = new RegExp(`^(?:${translated([...pattern])})$`, "u");
  globs.set(pattern, made);
  return made;
}

function translated(letters: string[]): string {
  const found: string[] = [];
  let at = 0;
  while (at < letters.length) {
    const letter = letters[at]!;
    const end = letter === "[" ? closing(letters, at + 1) : -1;
    if (end >= 0) found.push(set(letters.slice(at + 1, end)));
    else found.push(letter === "*" ? "[\\s\\S]*" : letter === "?" ? "[\\s\\S]" : escaped(letter));
    at = end >= 0 ? end + 1 : at + 1;
  }
  return found.join("");
}

/** Where a set ends that begins here; a bracket that comes first in it is one of its letters. */
function closing(letters: string[], from: number): number {
  const first = letters[from] === "!" ? from + 1 : from;
  return letters.indexOf("]", letters[first] === "]" ? first + 1 : first);
}

function set(letters: string[]): string {
  const isNegated = letters[0] === "!";
  const parts = ranges(isNegated ? letters.slice(1) : letters);
  if (!parts.length) return isNegated ? "[\\s\\S]" : "(?!)";
  return `[${isNegated ? "^" : ""}${parts.join("")}]`;
}

/** A hyphen between two letters is a range, which is empty where it goes backwards. */
function ranges(letters: string[]): string[] {
  const found: string[] = [];
  let at = 0;
  while (at < letters.length) {
    const [from, hyphen, to] = letters.slice(at, at + 3) as [string, string?, string?];
    const isRange = hyphen === "-" && to !== undefined;
    if (!isRange) found.push(escaped(from));
    else if (from.codePointAt(0)! <= to.codePointAt(0)!) found.push(`${escaped(from)}-${escaped(to)}`);
    at += isRange ? 3 : 1;
  }
  return found;
}

function escaped(letter: string): string {
  return `\\u{${letter.codePointAt(0)!.toString(16)}}`;
}
