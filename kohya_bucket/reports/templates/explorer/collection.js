/* The images at hand: where they come from, and what their headers say. */

const LANES = 24; // files that are opened at a time
const folderOf = (path) => path.slice(0, Math.max(0, path.lastIndexOf("/")));

class Collection {
  /* `endings`: of images, in lower case with the dot. */
  constructor(endings) {
    this.endings = new Set(endings);
    this.clear();
  }

  clear() {
    this.items = [];
    this.known = new Set();
    this.groups = new Map();
    this.passedOver = new Map();
    this.reading = { done: 0, all: 0 };
    this.version = (this.version || 0) + 1;
  }

  /* The folder of an image, with what an epoch repeats it, and the data sets that it belongs to (null: all). */
  group(folder, repeats = 1, datasets = null) {
    const key = `${folder}\n${datasets ? datasets.join() : ""}`;
    if (!this.groups.has(key)) this.groups.set(key, { folder, repeats, datasets, own: repeats, images: 0 });
    return this.groups.get(key);
  }

  add(item, group) {
    item.group = group;
    group.images++;
    this.items.push(item);
    this.version++;
  }

  /* What Python put into the page: columns of images, their folders, and where they lie. */
  take({ base, groups, group, names, sizes, turned, failures }) {
    const mine = groups.map(([folder, repeats, datasets]) => this.group(folder, repeats, datasets));
    const address = base && ((path) => { try { return base + path.split("/").map(encodeURIComponent).join("/"); } catch { return null; } });
    names.forEach((name, i) => {
      const to = mine[group[i]], path = to.folder ? `${to.folder}/${name}` : name;
      this.known.add(path);
      this.add({ path, width: sizes[2 * i], height: sizes[2 * i + 1], orientation: turned[i] || 1, reason: failures[i] || null, url: address && address(path) }, to);
    });
  }

  /* Reads the headers of `found`, an iterable of {path, file()}; calls `tick` now and then. Resolves when all are read. */
  async read(found, tick) {
    const mine = this.version, queue = [];
    const stopped = () => this.stopped > mine;
    for await (const one of found) {
      const dot = one.path.lastIndexOf("."), ending = dot > one.path.lastIndexOf("/") + 1 ? one.path.slice(dot).toLowerCase() : "";
      if (!this.endings.has(ending)) this.passedOver.set(ending, (this.passedOver.get(ending) || 0) + 1);
      else if (!this.known.has(one.path)) { this.known.add(one.path); queue.push(one); this.reading.all++; }
      await breathe();
      if (stopped()) return;
    }
    let next = 0;
    const lane = async () => {
      while (next < queue.length && !stopped()) {
        const { path, file: open } = queue[next++], item = { path, width: 0, height: 0, orientation: 1, reason: null };
        try {
          item.file = await open();
          Object.assign(item, await readHeader(item.file));
        } catch (error) { item.reason = `it cannot be opened: ${error.message || error.name}`; }
        if (stopped()) return;
        this.add(item, this.group(folderOf(path), repeatsOf(folderOf(path))));
        this.reading.done++;
        tick();
        await breathe();
      }
    };
    await Promise.all(Array.from({ length: LANES }, lane));
  }

  stop() { this.stopped = ++this.version; this.clear(); }
}

/* `10_name` means ten repeats, as with sd-scripts' --train_data_dir. */
function repeatsOf(folder) {
  const count = /(?:^|\/)(\d{1,6})(?:_[^/]*)?$/.exec(folder);
  return count && +count[1] >= 1 && /_/.test(folder.slice(folder.lastIndexOf("/") + 1)) ? +count[1] : 1;
}

/* Files of an `<input>`, folders included. */
function* chosenFiles(list) {
  for (const file of list) yield { path: file.webkitRelativePath || file.name, file: async () => file };
}

/* Files below dropped entries. Folders give their contents in portions. */
async function* droppedFiles(entries) {
  const pending = [...entries];
  while (pending.length) {
    const entry = pending.shift();
    if (entry.isFile) {
      yield { path: entry.fullPath.replace(/^\//, ""), file: () => new Promise((go, fail) => entry.file(go, fail)) };
      continue;
    }
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((go, fail) => reader.readEntries(go, fail));
      if (!some.length) break;
      pending.push(...some);
    }
  }
}
