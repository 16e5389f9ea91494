/* Long work in short turns, so that the page answers in between. */

const TURN = 10; // milliseconds
const turns = new MessageChannel(), waiting = [];
turns.port1.onmessage = () => waiting.shift()();
let turnBegan = performance.now();

/* Goes on at once, or in the next turn of the event loop where this one has lasted long enough. */
async function breathe() {
  if (performance.now() - turnBegan < TURN) return;
  await new Promise((go) => { waiting.push(go); turns.port2.postMessage(0); });
  turnBegan = performance.now();
}

/* Calls of the returned function run `work` at the next frame, once. */
function atFrame(work) {
  let asked = 0;
  return () => { asked ||= requestAnimationFrame(() => { asked = 0; work(); }); };
}
