/* TOML with the place of every value, so that one can be changed and all else stays as it was written. */

class TomlError extends Error {}

class TomlText {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.tables = [{ name: [], array: false, start: 0, entries: [] }];
    while (this.skipBlank(), this.at < text.length) {
      if (text[this.at] === "[") this.header(); else this.entry(this.tables.at(-1));
      this.endOfLine();
    }
  }

  line(at = this.at) { return this.text.slice(0, at).split("\n").length; }
  fail(what) { throw new TomlError(`line ${this.line()}: ${what}`); }
  look(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  skipBlank() { this.look(/(?:[ \t\r\n]|#[^\n]*)*/y); }
  endOfLine() { if (!this.look(/[ \t]*(?:#[^\n]*)?(?:\r?\n|$)/y)) this.fail("something follows a value on its line"); }

  header() {
    const start = this.at, array = this.text.startsWith("[[", start), close = array ? "]]" : "]";
    this.at += close.length;
    const name = this.key();
    if (!this.text.startsWith(close, this.at)) this.fail("a table's name is not closed");
    this.at += close.length;
    this.tables.push({ name, array, start, line: this.line(start), after: this.at, entries: [] });
  }

  key() {
    const parts = [];
    do {
      this.look(/[ \t]*/y);
      const quoted = /["']/.test(this.text[this.at] || "");
      parts.push(quoted ? this.string() : (this.look(/[A-Za-z0-9_-]+/y) || this.fail("a key is missing"))[0]);
      this.look(/[ \t]*/y);
    } while (this.look(/\./y));
    return parts;
  }

  entry(table) {
    const keyStart = this.at, key = this.key();
    if (!this.look(/=[ \t]*/y)) this.fail(`"=" is missing after ${key.join(".")}`);
    const start = this.at, value = this.value();
    table.entries.push({ key, keyStart, start, end: this.at, value, line: this.line(keyStart) });
  }

  value() {
    const sign = this.text[this.at];
    if (sign === '"' || sign === "'") return this.string();
    if (sign === "[") return this.list();
    if (sign === "{") return this.inline();
    const word = (this.look(/[^\s,#\]}]+(?: \d\d:[^\s,#\]}]+)?/y) || this.fail("a value is missing"))[0];
    if (word === "true" || word === "false") return word === "true";
    const plain = word.replace(/(\d)_(?=\d)/g, "$1");
    if (/^[+-]?(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|inf|nan)$/.test(plain)) return /inf|nan/.test(plain) ? NaN : Number(plain);
    if (/^0[xob][0-9a-fA-F]+$/.test(plain)) return Number(plain);
    return /^\d{4}-\d\d-\d\d|^\d\d:\d\d/.test(word) ? word : this.fail(`${word} is not a value`);
  }

  string() {
    const long = this.look(/"""([^]*?(?<!\\)(?:\\\\)*"{0,2})"""|'''([^]*?'{0,2})'''/y);
    if (long) return long[2] ?? long[1];
    const found = this.look(/"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)'/y) || this.fail("a text is not closed");
    if (found[2] !== undefined) return found[2];
    return found[1].replace(/\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)/g, (_, code) =>
      /^[uU]./.test(code) ? String.fromCodePoint(Math.min(parseInt(code.slice(1), 16), 0x10ffff)) : { n: "\n", t: "\t", r: "\r", b: "\b", f: "\f" }[code] ?? code);
  }

  list() {
    const out = [];
    this.at++;
    for (this.skipBlank(); !this.look(/\]/y); this.skipBlank()) {
      if (this.at >= this.text.length) this.fail("a list is not closed");
      out.push(this.value());
      this.skipBlank();
      if (!this.look(/,/y) && this.text[this.at] !== "]") this.fail("a comma is missing in a list");
    }
    return out;
  }

  inline() {
    const inner = { entries: [] };
    this.at++;
    for (this.look(/[ \t]*/y); !this.look(/\}/y); this.look(/[ \t]*/y)) {
      this.entry(inner);
      this.look(/[ \t]*/y);
      if (!this.look(/,/y) && this.text[this.at] !== "}") this.fail("a table in braces is not closed");
    }
    return Object.fromEntries(inner.entries.map((one) => [one.key.join("."), one.value]));
  }
}

/* A value as TOML writes it. */
const asToml = (value) => (Array.isArray(value) ? `[${value.map(asToml).join(", ")}]` : JSON.stringify(value));
