/** The data of the page, as `src/whence/viewer` writes it. */

export const FORM = 3;

export interface RawProgram {
  form: number;
  name: string;
  torch: string;
  device: string | null;
  notes: string;
  history: Pass[];
  calls: { path: number[]; index: number[]; type: number[]; parent: number[]; figures: Record<string, number[]> };
  nodes: {
    name: string[];
    op: number[];
    target: number[];
    expression: number[];
    reads: number[];
    count: number[];
    within: number[];
    place: number[];
    phase: number[];
    quality: number[];
    source: number[];
    forward: number[];
    recomputed: number[];
    calls: Record<string, number[]>;
    passes: Record<string, number[]>;
  };
  costs: { flops: number[]; read: number[]; written: number[]; seconds: number[] };
  made: number[];
  bases: number[];
  values: (number | null)[] | null;
  memory: {
    peak: number;
    at: number;
    where: string;
    parts: Record<string, number>;
    nodes: number[];
    alive: number[];
    kept: { node: number[]; consumer: number[]; bytes: number[]; reads: number[] };
  };
  chosen: { marks: Record<string, number[]>; kinds: string[]; said: Record<string, [number, number[]][]> };
  /** Name, kind, path, aliases, what it is of, the class of the module that holds it, and whether one does. */
  inputs: [string, number, string, string[], string | null, string | null, boolean][];
  outputs: [string, number, string, string | null | undefined][];
  texts: string[];
}

/** What a pass did: how many operations are gone, new and edited, by operator and in which calls. */
export interface Pass {
  name: string;
  options: string;
  operations: number;
  added: number;
  removed: number;
  edited: number;
  changes: { operator: string; added: number; removed: number; edited: number; calls: string[] }[];
}

export type Operation = [string, string];

export interface CallChange {
  calls: string[];
  phase: string;
  added: [Operation, number][];
  removed: [Operation, number][];
  moved: [Operation, number][];
  /** The operator, what it made, and what it makes now. */
  changed: [[string, string, string], number][];
}

export interface Difference {
  ok: boolean;
  appeared: string[];
  gone: string[];
  retyped: [string, string, string][];
  rows: CallChange[];
  inputs: string[];
  outputs: string[];
}

export interface Data {
  programs: RawProgram[];
  difference: Difference | null;
}

export async function load(element: Element): Promise<Data> {
  const { deflate } = JSON.parse(element.textContent ?? "") as { deflate: string };
  const bytes = Uint8Array.from(atob(deflate), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = (await new Response(stream).json()) as Data;
  const forms = data.programs.map((program) => program.form);
  if (forms.some((form) => form !== FORM)) throw new Error(`this page reads form ${FORM}, and its data is of form ${forms}`);
  return data;
}
