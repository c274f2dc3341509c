/** Numbers as whence prints them: three digits and a power of a thousand, `1.23 M`. */

const SCALE = ["", "k", "M", "G", "T", "P"];

export function scaled(value: number, unit = ""): string {
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < SCALE.length - 1) {
    value /= 1000;
    at += 1;
  }
  const end = `${SCALE[at]}${unit}`;
  return end ? `${digits(value)} ${end}` : digits(value);
}

function digits(value: number): string {
  return String(Number(value.toPrecision(3)));
}

export function counted(value: number): string {
  return value.toLocaleString("en-US");
}

export function times(count: number, one: string, several = `${one}s`): string {
  return `${counted(count)} ${count === 1 ? one : several}`;
}

export function micro(seconds: number): string {
  return scaled(seconds * 1e6, "µs").replace("kµs", "ms").replace("Mµs", "s");
}
