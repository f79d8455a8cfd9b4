// The page of ebbd: it asks for the status once a second and draws it. Texts and numbers come from
// guests and names of files. They are only ever set as text, and sizes are bounded before they are
// drawn.
"use strict";

const KEEP_MS = 600_000;
const ASK_MS = 1_000;
const PARTS = [
  ["in_use", "in use"], ["cache", "cache"], ["free", "free, held by the host"],
  ["unknown", "resident, use unknown"], ["returned", "returned"], ["balloon", "balloon"],
];

const at = (id) => document.getElementById(id);
const samples = [];
let limits = [];
let status = null;
let chosen = null;
let rounds = 0;

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function number(value) {
  return Number.isFinite(value) && value > 0 ? value : 0;
}

function size(bytes) {
  let value = number(bytes);
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
}

function time(ms) {
  const seconds = Math.round(number(ms) / 1000);
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

// The sizes of a machine's parts, as in `ebb top`: each takes at most what is left, so that they
// add up to the machine's size.
function parts(machine) {
  const found = { in_use: 0, cache: 0, free: 0, unknown: 0, balloon: 0, returned: 0 };
  if (!machine) return found;
  let left = number(machine.size_bytes);
  const take = (bytes) => {
    const taken = Math.min(number(bytes), left);
    left -= taken;
    return taken;
  };
  found.balloon = take(machine.balloon ? machine.balloon.actual_bytes : 0);
  const outside = left;
  if (machine.resident_bytes === null || machine.resident_bytes === undefined) {
    found.unknown = left;
    return found;
  }
  const resident = take(machine.resident_bytes);
  found.returned = left;
  const said = machine.statistics;
  if (!said || typeof said.available_bytes !== "number") {
    found.unknown = resident;
    return found;
  }
  const available = number(said.available_bytes);
  found.in_use = Math.min(Math.max(outside - available, 0), resident);
  const cache = Math.max(available - number(said.free_bytes), 0);
  found.cache = Math.min(cache, resident - found.in_use);
  found.free = resident - found.in_use - found.cache;
  return found;
}

function words(rule) {
  return rule && rule.name ? String(rule.name).replaceAll("_", " ") : "no decision yet";
}

function value(name, found) {
  if (found === null || found === undefined) return "unknown";
  if (name.endsWith("_bytes")) return size(found);
  if (name.endsWith("_ms")) return time(found);
  if (typeof found === "object") return JSON.stringify(found);
  return String(found);
}

function label(name) {
  return name.replace(/_(bytes|ms)$/, "").replaceAll("_", " ");
}

function drawChart(name, key, marks, top) {
  const chart = at(name);
  chart.replaceChildren();
  const most = Math.max(top, ...samples.map((sample) => sample[key]), 1);
  const now = samples.length ? samples[samples.length - 1].at : 0;
  const x = (sample) => 600 - ((now - sample.at) / KEEP_MS) * 600;
  const y = (bytes) => 118 - (Math.min(bytes, most) / most) * 114;
  const draw = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [attribute, text] of Object.entries(attributes)) {
      element.setAttribute(attribute, text);
    }
    chart.append(element);
  };
  for (const bytes of marks) {
    draw("line", { class: "limit", x1: 0, x2: 600, y1: y(bytes), y2: y(bytes) });
  }
  if (!samples.length) return;
  const line = samples.map((sample) => `${x(sample).toFixed(1)},${y(sample[key]).toFixed(1)}`);
  const first = x(samples[0]).toFixed(1);
  draw("polygon", { class: "area", points: `${first},120 ${line.join(" ")} 600,120` });
  draw("polyline", { class: "edge", points: line.join(" ") });
}

function drawMachines() {
  const filter = at("filter").value.toLowerCase();
  const order = at("order").value;
  const rows = (status.machines || [])
    .map((machine) => ({ machine, parts: parts(machine.machine) }))
    .filter((row) => String(row.machine.name).toLowerCase().includes(filter));
  const key = (row) => {
    if (order === "in_use") return row.parts.in_use;
    return number(row.machine.machine && row.machine.machine.resident_bytes);
  };
  if (order !== "name") rows.sort((one, other) => key(other) - key(one));
  const list = at("machines");
  const focused = document.activeElement && document.activeElement.dataset
    ? document.activeElement.dataset.place : undefined;
  list.replaceChildren();
  for (const { machine, parts } of rows) {
    const row = make("button");
    row.type = "button";
    row.dataset.place = machine.socket;
    row.setAttribute("aria-expanded", String(machine.socket === chosen));
    row.append(make("b", machine.name));
    const bar = make("span", undefined, "bar");
    const total = PARTS.reduce((sum, [part]) => sum + parts[part], 0);
    for (const [part, name] of PARTS) {
      if (total === 0 || parts[part] === 0) continue;
      const cell = make("i", undefined, part);
      cell.style.width = `${(parts[part] / total) * 100}%`;
      cell.title = `${name}: ${size(parts[part])}`;
      bar.append(cell);
    }
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", PARTS.map(([part, name]) => `${name} ${size(parts[part])}`)
      .join(", "));
    row.append(bar);
    const held = machine.is_held ? ", held" : "";
    const rule = machine.explanation ? words(machine.explanation.rule) : "no decision yet";
    const note = machine.trouble || `${size(total)}, ${rule}${held}`;
    row.append(make("small", note, machine.trouble ? "bad" : undefined));
    row.addEventListener("click", () => {
      chosen = chosen === machine.socket ? null : machine.socket;
      draw();
    });
    const item = make("li");
    item.append(row);
    list.append(item);
    if (focused !== undefined && machine.socket === focused) row.focus();
  }
  at("none").hidden = rows.length > 0;
}

function drawDetails() {
  const machine = (status.machines || []).find((found) => found.socket === chosen);
  at("details").hidden = !machine;
  if (!machine) return;
  at("details-name").textContent = machine.name;
  const list = at("details-list");
  list.replaceChildren();
  const add = (name, text) => list.append(make("dt", name), make("dd", text));
  add("monitor", `${machine.monitor || "unknown"}, process ${machine.pid || "unknown"}`);
  add("socket", machine.socket);
  add("profile", machine.profile);
  if (machine.trouble) add("trouble", machine.trouble);
  for (const [part, name] of PARTS) add(name, size(parts(machine.machine)[part]));
  const why = machine.explanation;
  if (!why) return;
  add("decision", words(why.rule));
  for (const [name, found] of Object.entries(why.rule || {})) {
    if (name !== "name") add(label(name), value(name, found));
  }
  add("action", why.action ? JSON.stringify(why.action) : "none");
  if (why.clamp) add("limit", JSON.stringify(why.clamp));
  if (why.doubt) add("statistics are not used", JSON.stringify(why.doubt));
  if (why.since_ms !== undefined) add("for", time(status.at_ms - why.since_ms));
}

function draw() {
  if (!status) return;
  const { host, level, cause } = status;
  const since = time(status.at_ms - status.since_ms);
  const swap = host.swap
    ? `, swap ${size(host.swap.used_bytes)} of ${size(host.swap.total_bytes)}` : "";
  at("host").textContent = `${level} for ${since}: ${size(host.available_bytes)} of `
    + `${size(host.total_bytes)} available${swap}`;
  at("host").title = value("cause", cause);
  at("problems").replaceChildren(...(status.problems || []).map((text) => make("li", text)));
  drawChart("available", "available", limits.map((limit) => limit.bytes), number(host.total_bytes));
  drawChart("resident", "resident", [], 0);
  const last = samples[samples.length - 1];
  at("available-legend").textContent = limits.length
    ? `Dashed: ${limits.map((limit) => `${limit.level} below ${size(limit.bytes)}`).join(", ")}`
    : "";
  at("resident-legend").textContent = last ? `Now ${size(last.resident)}` : "";
  drawMachines();
  drawDetails();
}

function drawLegend() {
  for (const [part, name] of PARTS) {
    const entry = make("span");
    entry.append(make("i", undefined, part), name);
    at("legend").append(entry);
  }
}

async function get(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(5_000), cache: "no-store" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer;
}

async function askLimits() {
  const text = await (await get("/metrics")).text();
  const found = text.matchAll(/^ebbd_host_level_limit_bytes\{level="(\w+)"\} (\d+)$/gm);
  limits = [...found].map(([, level, bytes]) => ({ level, bytes: Number(bytes) }));
}

async function round() {
  try {
    if (rounds % 30 === 0) await askLimits();
    rounds += 1;
    status = await (await get("/status")).json();
    const resident = (status.machines || []).reduce(
      (sum, found) => sum + number(found.machine && found.machine.resident_bytes), 0);
    const now = Date.now();
    samples.push({ at: now, available: number(status.host.available_bytes), resident });
    while (samples.length && now - samples[0].at > KEEP_MS) samples.shift();
    at("trouble").hidden = true;
    draw();
  } catch (error) {
    at("trouble").textContent = `ebbd does not answer (${error.message}); what is shown is old.`;
    at("trouble").hidden = false;
  }
  setTimeout(round, ASK_MS);
}

drawLegend();
at("tools").addEventListener("submit", (event) => event.preventDefault());
at("filter").addEventListener("input", draw);
at("order").addEventListener("change", draw);
round();
