// The page of `hebbian play`: one module, no framework. All text from elsewhere is set as text, never as HTML.

const SIZE = 28; // pixels a side of a drawing
const FINE = 4; // finer pixels a side in each of them, over which ink is averaged
const LONGEST_FILE = 1 << 20;
const HEADS = ["plain", "hebbian"];
const TITLES = { plain: "Plain softmax", hebbian: "Hebbian head" };
// The pen's width and the longer side of a character, in pixels of 28, as in the images that the network knows.
const STYLES = { omniglot: { pen: 1.1, side: 19 }, glyphs: { pen: 2.2, side: 22 } };

const $ = (id) => document.getElementById(id);
const state = { session: null, known: [], pictures: null, taught: [], style: STYLES.glyphs, ready: [] };

// ---- talking to the server -------------------------------------------------------------------------------------

async function call(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer: is hebbian play still running?");
  }
  const kind = response.headers.get("Content-Type");
  if (response.ok && kind === "application/octet-stream") return new Uint8Array(await response.arrayBuffer());
  if (kind !== "application/json") throw new Error(`The server is busy (status ${response.status}): try again in a moment.`);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

const lesson = (act, values = {}) => call("/api/lesson", { act, session: state.session, ...values });

function say(text, bad = false) {
  $("message").textContent = text;
  $("message").classList.toggle("bad", bad);
}

// Runs what a button asks for; an error becomes a message.
function doing(work) {
  return async (event) => {
    event?.preventDefault?.();
    try {
      say("");
      await work(event);
    } catch (error) {
      say(error.message, true);
    }
  };
}

// A reloaded tab keeps its lesson; a duplicated tab gets a new one, because the first holds the lock of its lesson.
function claim(session) {
  if (!navigator.locks) return Promise.resolve(true);
  return new Promise((resolve) => {
    navigator.locks.request(`lesson ${session}`, { ifAvailable: true }, (lock) => {
      resolve(lock !== null);
      return lock === null ? undefined : new Promise(() => {});
    });
  });
}

async function openSession() {
  let kept = sessionStorage.getItem("session");
  if (kept !== null && !(await claim(kept))) kept = null;
  const { session, curriculum } = await call("/api/session", { session: kept });
  if (session !== kept) await claim(session);
  sessionStorage.setItem("session", session);
  state.session = session;
  if (curriculum) watch();
}

// ---- drawings --------------------------------------------------------------------------------------------------

const toHex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
const fromHex = (text) => Uint8Array.from(text.match(/../g), (pair) => parseInt(pair, 16));

function picture(bytes, label = "") {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIZE;
  canvas.className = "ink";
  if (label) {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
  } else canvas.setAttribute("aria-hidden", "true");
  paint(canvas, bytes);
  return canvas;
}

function paint(canvas, bytes) {
  const pixels = new ImageData(SIZE, SIZE);
  bytes.forEach((ink, place) => { pixels.data[4 * place + 3] = ink; });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

// A finished drawing, taught or ready-made, goes away when the next line begins.
const paper = { strokes: [], made: null, finished: false, pointer: null, pen: { x: 0.5, y: 0.5, down: false, shown: false } };

function render() {
  const canvas = $("paper"), pen = canvas.getContext("2d"), side = canvas.width;
  pen.clearRect(0, 0, side, side);
  if (paper.made) {
    pen.imageSmoothingEnabled = false;
    pen.drawImage(picture(paper.made), 0, 0, side, side);
  }
  trace(pen, (x) => x * side, (y) => y * side, (side * state.style.pen) / state.style.side * 0.7);
  if (paper.pen.shown) {
    pen.strokeStyle = paper.pen.down ? "#c00" : "#888";
    pen.lineWidth = 2;
    pen.strokeRect(paper.pen.x * side - 7, paper.pen.y * side - 7, 14, 14);
  }
  const count = paper.strokes.length;
  canvas.setAttribute("aria-label", `Drawing area, ${paper.made ? "a ready-made drawing" : count === 1 ? "1 line" : `${count} lines`}`);
}

function trace(pen, toX, toY, width) {
  pen.lineCap = pen.lineJoin = "round";
  pen.lineWidth = width;
  pen.strokeStyle = pen.fillStyle = "#000";
  for (const stroke of paper.strokes) {
    const [x, y] = [toX(stroke[0].x), toY(stroke[0].y)];
    pen.beginPath(); // a dot where the line begins: browsers differ in what they make of a line without length
    pen.arc(x, y, width / 2, 0, 2 * Math.PI);
    pen.fill();
    pen.beginPath();
    pen.moveTo(x, y);
    for (const point of stroke.slice(1)) pen.lineTo(toX(point.x), toY(point.y));
    pen.stroke();
  }
}

// Returns the drawing as the network sees it, in the middle and of the usual size, or null if there is none.
function pixels() {
  if (paper.made) return paper.made;
  const points = paper.strokes.flat();
  if (!points.length) return null;
  const xs = points.map((point) => point.x), ys = points.map((point) => point.y);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const { pen: width, side } = state.style;
  const scale = FINE * Math.min((side - width) / Math.max(right - left, bottom - top, 1e-6), 3 * SIZE);
  const middle = (FINE * SIZE) / 2;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = FINE * SIZE;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const toX = (x) => middle + (x - (left + right) / 2) * scale, toY = (y) => middle + (y - (top + bottom) / 2) * scale;
  trace(pen, toX, toY, FINE * width);
  const ink = pen.getImageData(0, 0, FINE * SIZE, FINE * SIZE).data;
  const sums = new Float32Array(SIZE * SIZE);
  for (let y = 0; y < FINE * SIZE; y++) {
    for (let x = 0; x < FINE * SIZE; x++) {
      sums[Math.floor(y / FINE) * SIZE + Math.floor(x / FINE)] += ink[4 * (y * FINE * SIZE + x) + 3];
    }
  }
  return Uint8Array.from(sums, (sum) => Math.round(sum / FINE / FINE));
}

function changed() {
  render();
  look();
}

function clearPaper() {
  paper.strokes = [];
  paper.made = paper.pointer = null; // a line that is being drawn ends here
  paper.finished = paper.pen.down = false;
  for (const button of document.querySelectorAll("#ready-made [aria-pressed=true]")) button.setAttribute("aria-pressed", "false");
}

function choose(bytes, button) {
  clearPaper();
  paper.made = bytes;
  paper.finished = true;
  button?.setAttribute("aria-pressed", "true");
  changed();
}

function place(event) {
  const box = $("paper").getBoundingClientRect();
  const inside = (value) => Math.min(1, Math.max(0, value));
  return { x: inside((event.clientX - box.left) / box.width), y: inside((event.clientY - box.top) / box.height) };
}

function beginLine(point) {
  if (paper.finished) clearPaper();
  paper.strokes.push([point]);
}

function listenToPen() {
  const canvas = $("paper");
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    beginLine(place(event));
    canvas.setPointerCapture(event.pointerId);
    paper.pen.shown = paper.pen.down = false;
    paper.pointer = event.pointerId;
    changed();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerId !== paper.pointer) return;
    const moves = event.getCoalescedEvents?.() ?? [];
    paper.strokes.at(-1).push(...(moves.length ? moves : [event]).map(place));
    changed();
  });
  const lift = (event) => {
    if (event.pointerId !== paper.pointer) return;
    paper.pointer = null;
    announce();
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("keydown", drawByKeys);
  canvas.addEventListener("blur", () => { paper.pen.shown = paper.pen.down = false; render(); });
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function drawByKeys(event) {
  const pen = paper.pen;
  if (event.key in ARROWS) {
    const [right, down] = ARROWS[event.key], step = event.shiftKey ? 0.01 : 0.04;
    pen.x = Math.min(1, Math.max(0, pen.x + step * right));
    pen.y = Math.min(1, Math.max(0, pen.y + step * down));
    if (pen.down) paper.strokes.at(-1).push({ x: pen.x, y: pen.y });
  } else if (event.key === " ") {
    if (!pen.down) beginLine({ x: pen.x, y: pen.y });
    pen.down = !pen.down;
    paper.pointer = null;
    if (!pen.down) announce();
  } else if (event.key === "Backspace") {
    paper.strokes.pop();
    paper.pointer = null;
    pen.down = false;
  } else if (event.key === "Delete") clearPaper();
  else return;
  event.preventDefault();
  pen.shown = true;
  changed();
}

// ---- answers ---------------------------------------------------------------------------------------------------

let wanted = null, looking = false, answers = null;

// Asks for the answers to what is on the paper now. One question is under way at a time, and only the latest waits.
async function look() {
  const bytes = pixels();
  wanted = bytes === null || !state.session ? null : toHex(bytes);
  if (wanted === null) {
    answers = null;
    showAnswers();
  }
  if (looking) return;
  looking = true;
  while (wanted !== null) {
    const drawing = wanted;
    wanted = null;
    try {
      const found = (await recognise(drawing)).answers;
      if (pixels() !== null) answers = found;
      showAnswers();
    } catch (error) {
      say(error.message, true);
    }
  }
  looking = false;
}

const taughtOnly = () => document.querySelector("[name=among]:checked").value === "taught" && state.taught.length > 0;
const recognise = (drawing, only = taughtOnly()) => lesson("recognise", { drawing, taught_only: only });

function nameOf(number) {
  return number < state.known.length ? state.known[number] : state.taught[number - state.known.length]?.name ?? "forgotten";
}

function pictureOf(number) {
  if (number < state.known.length) return state.pictures.subarray(number * SIZE * SIZE, (number + 1) * SIZE * SIZE);
  const taught = state.taught[number - state.known.length];
  return taught ? fromHex(taught.drawings[0]) : new Uint8Array(SIZE * SIZE);
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// Fills a list with rows of a picture, a name, a bar and a number. Rows are used again, so that nothing flickers.
function fill(list, rows) {
  while (list.children.length > rows.length) list.lastChild.remove();
  rows.forEach((row, place) => {
    let item = list.children[place];
    if (!item) {
      item = document.createElement("li");
      const what = document.createElement("div"), bar = document.createElement("div"), chance = document.createElement("div");
      what.className = "what";
      bar.className = "bar";
      bar.append(document.createElement("i"));
      what.append(document.createElement("span"), bar);
      chance.className = "chance";
      item.append(picture(new Uint8Array(SIZE * SIZE)), what, chance);
      list.append(item);
    }
    paint(item.children[0], row.bytes);
    const title = item.querySelector("span");
    title.textContent = title.title = row.name;
    title.classList.toggle("new", row.isNew ?? false);
    item.querySelector("i").style.width = `${100 * row.share}%`;
    item.children[2].textContent = percent(row.share);
  });
}

function showAnswers() {
  for (const head of HEADS) {
    fill($(`${head}-answers`), (answers?.[head] ?? []).map(([number, share]) => ({
      bytes: pictureOf(number), name: nameOf(number), share, isNew: number >= state.known.length,
    })));
  }
}

// Tells screen readers the first answers once a line is finished.
async function announce() {
  while (looking) await new Promise((resolve) => setTimeout(resolve, 20));
  if (!answers) return;
  say(HEADS.map((head) => `${TITLES[head]}: ${nameOf(answers[head][0][0])}, ${percent(answers[head][0][1])}`).join(". "));
}

// ---- teaching --------------------------------------------------------------------------------------------------

function showLesson(found) {
  state.taught = found.taught;
  $("undo").disabled = found.undoable === 0;
  $("nothing-taught").hidden = found.taught.length > 0;
  $("save").disabled = found.taught.length === 0;
  $("taught").replaceChildren(...found.taught.map(taughtRow));
  $("all-count").textContent = (state.known.length + found.taught.length).toLocaleString("en");
  if (found.milliseconds) {
    const { plain, hebbian } = found.milliseconds;
    $("learned").textContent = `Plain softmax took ${plain.toFixed(1)} ms, the Hebbian head ${hebbian.toFixed(1)} ms.`;
  }
  look();
}

function taughtRow({ name, drawings }) {
  const row = document.createElement("li"), what = document.createElement("span");
  what.className = "what";
  what.textContent = drawings.length > 1 ? `${name} (${drawings.length})` : name;
  const rename = button("Rename", `Rename ${name}`, () => {
    const form = document.createElement("form"), input = document.createElement("input");
    input.value = name;
    input.maxLength = 40;
    input.required = true;
    input.pattern = $("name").pattern;
    input.title = $("name").title;
    input.setAttribute("aria-label", `New name of ${name}`);
    form.append(input, button("OK", `Give ${name} its new name`));
    form.addEventListener("submit", doing(async () => showLesson(await lesson("rename", { name, new_name: input.value }))));
    row.replaceChildren(form);
    input.focus();
    input.select();
  });
  const forget = button("Forget", `Forget ${name}`, doing(async () => showLesson(await lesson("forget", { name }))));
  row.append(...drawings.slice(0, 4).map((drawing) => picture(fromHex(drawing))), what, rename, forget);
  return row;
}

function button(text, label, work) {
  const made = document.createElement("button");
  made.textContent = text;
  made.setAttribute("aria-label", label);
  if (work) {
    made.type = "button";
    made.addEventListener("click", work);
  }
  return made;
}

const manner = () => ({ steps: Number($("steps").value), replay: $("replay").checked });

async function teach() {
  const bytes = pixels();
  if (bytes === null) throw new Error("Draw something first, or choose a ready-made drawing.");
  const name = $("name").value.trim(), { strokes } = paper;
  showLesson(await lesson("teach", { name, drawing: toHex(bytes), ...manner() }));
  if (paper.strokes === strokes) paper.finished = true;
  say(`${name} is taught. Draw it again: is it recognised?`);
}

async function save() {
  const content = JSON.stringify(await lesson("save"), null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  link.download = "lesson.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function load() {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  if (file.size > LONGEST_FILE) throw new Error("This file is too large for a saved lesson.");
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error("This file is not a saved lesson: it is not JSON.");
  }
  say("Loading the lesson …");
  showLesson(await lesson("load", { lesson: content }));
  say("The lesson is loaded.");
}

function showReadyMade() {
  $("ready-made").replaceChildren(...state.ready.map(({ name, drawings }) => {
    const five = document.createElement("div");
    five.className = "five";
    five.append(...drawings.map((drawing, number) => {
      const bytes = fromHex(drawing), made = button("", `${name}, drawing ${number + 1}`, () => {
        choose(bytes, made);
        $("name").value = name;
      });
      made.setAttribute("aria-pressed", "false");
      made.append(picture(bytes));
      return made;
    }));
    return five;
  }));
}

// Keeps the two buttons from being pressed again until the work is done.
async function alone(work) {
  $("teach-all").disabled = $("test-all").disabled = true;
  try {
    await work();
  } finally {
    $("teach-all").disabled = $("test-all").disabled = false;
  }
}

async function teachAll() {
  const names = new Set(state.taught.map((each) => each.name));
  for (const { name, drawings } of state.ready) {
    if (!names.has(name)) showLesson(await lesson("teach", { name, drawing: drawings[0], ...manner() }));
  }
  say("The first drawing of each character is taught.");
}

// Shows the ready-made drawings that were not taught, and counts how many each head gets right; then counts how many of
// the characters that the network knew before are still recognised.
async function testAll() {
  const rows = new Map(state.taught.map((each, number) => [each.name, { number: state.known.length + number, ...each }]));
  const right = { plain: 0, hebbian: 0 }, only = taughtOnly();
  const among = only ? `the ${rows.size} taught here` : `all ${$("all-count").textContent}`;
  let shown = 0;
  $("price").textContent = "";
  for (const { name, drawings } of state.ready) {
    const row = rows.get(name);
    for (const drawing of row ? drawings.filter((each) => !row.drawings.includes(each)) : []) {
      choose(fromHex(drawing));
      const found = await recognise(drawing, only);
      shown += 1;
      for (const head of HEADS) right[head] += found.answers[head][0][0] === row.number;
      $("score").textContent = `Recognised among ${among}: plain softmax ${right.plain} of ${shown}, Hebbian head ${right.hebbian} of ${shown}.`;
    }
  }
  if (!shown) throw new Error("Teach some of these characters first.");
  const { right: kept, of } = await lesson("review");
  $("price").textContent = `The price: of ${of.toLocaleString("en")} characters that the network had learned, ${kept.before} were `
    + `recognised before the lesson. Now plain softmax recognises ${kept.plain}, the Hebbian head ${kept.hebbian}.`;
}

// ---- the curriculum --------------------------------------------------------------------------------------------

let source = null, checks = [], marks = [], total = 2000, paused = false;

const curriculum = (act, values = {}) => call("/api/curriculum", { act, session: state.session, ...values });
const rate = () => ({ gamma: Number($("gamma").value), limit: Number($("limit").value) });

function running(on) {
  for (const id of ["pause", "change", "stop"]) $(id).disabled = !on;
  $("start").textContent = checks.length || on ? "Start again" : "Start";
}

function watch() {
  source?.close();
  source = new EventSource(`/api/curriculum?session=${state.session}`);
  checks = [];
  marks = [];
  paused = false;
  $("pause").textContent = "Pause";
  running(true);
  const tell = (text) => { $("curriculum-state").textContent = text; };
  const over = (text) => { source.close(); tell(text); running(false); };
  const on = (kind, work) => source.addEventListener(kind, (event) => work(JSON.parse(event.data)));
  tell("Getting ready …");
  drawChart();
  on("started", (event) => { total = event.steps; checks = [{ step: 0, plain: event.start, hebbian: event.start }]; drawChart(); });
  on("check", (event) => { showCheck(event); tell(`Step ${event.step.toLocaleString("en")} of ${total.toLocaleString("en")}`); });
  on("pause", () => { paused = true; $("pause").textContent = "Resume"; tell("Paused."); });
  on("resume", () => { paused = false; $("pause").textContent = "Pause"; tell("Going on …"); });
  on("change", (event) => {
    marks.push({ step: checks.at(-1)?.step ?? 0, text: `γ ${event.gamma}, T ${event.limit}` });
    drawChart();
  });
  on("finished", () => over(`Finished after ${total.toLocaleString("en")} steps.`));
  on("stopped", () => over("Stopped."));
  on("failed", (event) => over(event.error));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) over("The server no longer has this curriculum: start it again.");
    else tell("The server does not answer: is hebbian play still running? Trying again …");
  });
}

function showCheck(event) {
  checks.push({ step: event.step, plain: event.heads.plain.classes, hebbian: event.heads.hebbian.classes });
  for (const head of HEADS) {
    const { classes, accuracy, hardest } = event.heads[head];
    $(`${head}-classes`).textContent = classes;
    $(`${head}-accuracy`).textContent = percent(accuracy);
    fill($(`${head}-hardest`), hardest.map((each) => ({ bytes: fromHex(each.picture), name: each.name, share: each.accuracy })));
  }
  drawChart();
}

function shape(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawChart() {
  const [left, right, top, bottom] = [44, 545, 14, 226];
  const most = Math.max(50, ...checks.map((check) => Math.max(check.plain, check.hebbian)));
  const tick = [10, 20, 50, 100, 200, 500, 1000].find((size) => most / size <= 6) ?? 1000;
  const x = (step) => left + ((right - left) * step) / total;
  const y = (classes) => bottom - ((bottom - top) * classes) / (Math.ceil(most / tick) * tick);
  const parts = [];
  for (let classes = 0; classes <= most + tick - 1; classes += tick) {
    parts.push(shape("line", { class: "axis", x1: left, x2: right, y1: y(classes), y2: y(classes) }));
    parts.push(shape("text", { x: left - 6, y: y(classes) + 4, "text-anchor": "end" }, classes));
  }
  for (const share of [0, 0.5, 1]) {
    parts.push(shape("text", { x: x(share * total), y: bottom + 22, "text-anchor": "middle" }, `${(share * total).toLocaleString("en")}${share === 1 ? " steps" : ""}`));
  }
  for (const mark of marks) {
    parts.push(shape("line", { class: "mark", x1: x(mark.step), x2: x(mark.step), y1: top, y2: bottom }));
    parts.push(shape("text", { x: x(mark.step) + 4, y: top + 10 }, mark.text));
  }
  const last = checks.at(-1);
  for (const head of last ? HEADS : []) {
    const other = last[head === "plain" ? "hebbian" : "plain"];
    const apart = Math.abs(y(last[head]) - y(other)) < 16 ? (last[head] > other || (last[head] === other && head === "hebbian") ? -7 : 11) : 4;
    parts.push(shape("polyline", { class: head, points: checks.map((check) => `${x(check.step)},${y(check[head])}`).join(" ") }));
    parts.push(shape("text", { class: head, x: x(last.step) + 6, y: y(last[head]) + apart }, `${head === "plain" ? "plain" : "Hebbian"} ${last[head]}`));
  }
  $("chart").replaceChildren(...parts);
}

// ---- beginning -------------------------------------------------------------------------------------------------

function showTab(name) {
  for (const each of ["teach", "watch"]) {
    const tab = $(`tab-${each}`), chosen = each === name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(each).hidden = !chosen;
  }
}

function listen() {
  for (const name of ["teach", "watch"]) {
    $(`tab-${name}`).addEventListener("click", () => showTab(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = name === "teach" ? "watch" : "teach";
      showTab(other);
      $(`tab-${other}`).focus();
    });
  }
  $("teach-form").addEventListener("submit", doing(teach));
  $("clear").addEventListener("click", () => { clearPaper(); changed(); });
  $("steps").addEventListener("input", () => { $("steps-shown").textContent = $("steps").value; });
  for (const choice of document.querySelectorAll("[name=among]")) choice.addEventListener("change", look);
  $("undo").addEventListener("click", doing(async () => showLesson(await lesson("undo"))));
  $("save").addEventListener("click", doing(save));
  $("load").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", doing(load));
  $("teach-all").addEventListener("click", doing(() => alone(teachAll)));
  $("test-all").addEventListener("click", doing(() => alone(testAll)));
  $("curriculum-form").addEventListener("submit", doing(async () => {
    await curriculum("start", { ...rate(), steps: Number($("curriculum-steps").value), seed: Number($("seed").value) });
    watch();
  }));
  $("pause").addEventListener("click", doing(() => curriculum(paused ? "resume" : "pause")));
  $("change").addEventListener("click", doing(() => $("curriculum-form").reportValidity() && curriculum("change", rate())));
  $("stop").addEventListener("click", doing(() => curriculum("stop")));
  listenToPen();
}

async function untilReady() {
  for (;;) {
    const status = await call("/api/status");
    if (status.error) throw new Error(status.error);
    if (status.ready) return;
    $("progress").max = status.total;
    $("progress").value = status.done;
    const share = status.total > 1 ? ` (${Math.floor((100 * status.done) / status.total)} %)` : "";
    document.querySelector("label[for=progress]").textContent = `${status.stage[0].toUpperCase()}${status.stage.slice(1)}${share}`;
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
}

async function begin() {
  listen();
  drawChart();
  await openSession();
  await untilReady();
  const material = await call("/api/material");
  state.pictures = await call("/api/pictures");
  state.known = material.known;
  state.ready = material.ready_made;
  state.style = STYLES[material.images] ?? STYLES.glyphs;
  $("preparing").hidden = true;
  $("lesson").hidden = false;
  showReadyMade();
  showLesson(await lesson("show"));
  render();
}

begin().catch((error) => {
  $("preparing").hidden = true;
  say(error.message, true);
});
