// The demo's page: sends requests, and shows their responses next to the provider's charges and the shop's rows.
// Everything that was received is shown as text.

import { codeOf, counted, parsed, replayed, times, verdict } from "./verdict.js";

const SHOWN_HEADERS = ["Location", "Idempotency-Key", "Idempotent-Replayed", "Idempotency-Key-Expires", "Retry-After",
  "Content-Type"];
const NEWEST = 20;
const POLL = 1000;
const KEPT = "oncekey demo requests";
const ORDER = `{ "customer_id": "cus_1001",
  "items": [{ "product_id": "sku_teapot", "quantity": 2 }] }`;
const MONEY = `{ "customer_id": "cus_1001",
  "amount_cents": 1999, "currency": "EUR" }`;
const ROUTES = {
  "/orders": { name: "Orders", sample: ORDER, calls: false,
    hint: "One transaction in the shop's database, without a call to the provider." },
  "/payments": { name: "Payments", sample: MONEY, calls: true,
    hint: "A row, a charge at the provider, a receipt. A retry or a worker resumes after the last completed step." },
  "/transfers": { name: "Transfers", sample: MONEY, calls: true,
    hint: "The handler writes a row and a message, and returns 202. A worker makes the charge." },
  "/notifications": { name: null, sample: MONEY, calls: true,
    hint: "The handler calls the provider directly. If the reply is lost, the outcome is unknown." },
};

const at = (id) => document.getElementById(id);
const form = at("request");
const field = { route: at("route"), tenant: at("tenant"), delay: at("delay"), key: at("key"), body: at("body"),
  repeatable: at("repeatable"), dedup: at("dedup") };

// Keys

function newKey() {
  // randomUUID is missing if the page is not served from this machine; random bytes are always available.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

function takeNewKey() {
  field.key.value = newKey();
  showCurl();
  return field.key.value;
}

// Requests

function written() {
  return {
    route: field.route.value, tenant: field.tenant.value, key: field.key.value, delay: field.delay.value,
    body: field.body.value, repeatable: field.repeatable.checked, dedup: field.dedup.checked, fault: "",
  };
}

function headersOf(request) {
  const headers = { "Authorization": `Bearer ${request.tenant}`, "Content-Type": "application/json" };
  if (request.key !== null) headers["Idempotency-Key"] = request.key;
  if (!ROUTES[request.route].calls) {
    if (Number(request.delay) > 0) headers["X-Demo-Delay"] = request.delay;
    return headers;
  }
  if (request.fault) headers["X-Demo-Fault"] = request.fault;
  if (!request.repeatable) headers["X-Demo-Repeatable"] = "off";
  if (!request.dedup) headers["X-Demo-Dedup"] = "off";
  return headers;
}

async function send(title, request) {
  const sent = remember(request);
  const began = performance.now();
  const taken = () => Math.round(performance.now() - began);
  let answer;
  try {
    const response = await fetch(request.route, { method: "POST", headers: headersOf(request), body: request.body });
    const text = await response.text();
    const headers = SHOWN_HEADERS.filter((name) => response.headers.has(name)).map((name) => [name, response.headers.get(name)]);
    answer = { title, status: response.status, phrase: response.statusText, headers, text, took: taken() };
  } catch (error) {
    answer = { title, status: 0, phrase: "No response", headers: [], text: String(error), took: taken() };
  }
  sent.times += 1;
  return answer;
}

function altered(request) {
  try {
    const body = JSON.parse(request.body);
    if (body.items) body.items[0].quantity += 1; else body.amount_cents += 1;
    return JSON.stringify(body, null, 2);
  } catch {
    return ROUTES[request.route].sample.replace("cus_1001", "cus_2002");
  }
}

const ACTIONS = {
  once: async (request) => [await send("The request", request)],
  twice: async (request) => [await send("First", request), await send("Second", request)],
  together: (request) => Promise.all([send("First", request), send("Second", request)]),
  altered: async (request) => [
    await send("First", request),
    await send("Second, with another body", { ...request, body: altered(request) }),
  ],
  keyless: async (request) => [await send("Without a key", { ...request, key: null })],
};
const NEW_KEY = new Set(["together"]);

// The requests from this page: their responses, the states of their keys, and their charges

let requests = [];
let current = null;
let polling = null;

function remember(request) {
  const same = (one) => one.request.key === request.key && one.request.tenant === request.tenant;
  const known = request.key === null ? null : requests.find(same);
  if (known) return current = known;
  current = { request, state: null, answers: [], charges: null, rows: 0, times: 0, node: null };
  if (request.key !== null) requests.unshift(current);
  return current;
}

// The list is kept in the tab's storage, so that it survives a reload.
function keep() {
  const kept = requests.slice(0, NEWEST).map(({ node, ...sent }) => sent);
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    // If the storage is full or forbidden, only the list after a reload is lost.
  }
}

function restored() {
  try {
    return (parsed(sessionStorage.getItem(KEPT)) ?? []).map((sent) => ({ ...sent, node: null }));
  } catch {
    return [];
  }
}

const STATES = { completed: "good", in_progress: "wait", pending: "wait", failed_retryable: "wait", unknown: "bad" };
const turnedAway = (sent) => sent.state === null && sent.answers.length > 0
  && sent.answers.every((answer) => answer.status >= 400 && answer.status < 500);
const isOver = (sent) => sent.request.key === null || turnedAway(sent)
  || (sent.state?.state === "completed" && (sent.charges !== null || !ROUTES[sent.request.route].calls));

async function read(path, tenant) {
  try {
    const response = await fetch(path, { headers: { "Authorization": `Bearer ${tenant}` } });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

async function look(sent) {
  const { key, route, tenant } = sent.request;
  sent.state = await read(`/idempotency-keys/${encodeURIComponent(key)}`, tenant);
  // After the state: the ledger has the charges of a completed request by then.
  if (!ROUTES[route].calls) return;
  const found = await read(`/demo/charges/${encodeURIComponent(key)}`, tenant);
  sent.charges = found === null ? null : found.charges.length;
}

function seen(sent) {
  const { request, answers, state, charges, rows } = sent;
  return { answers, state, charges, rows, route: request.route, calls: ROUTES[request.route].calls,
    repeatable: request.repeatable };
}

function describe(list, pairs) {
  list.replaceChildren(...pairs.flatMap(([name, value]) => {
    const term = document.createElement("dt");
    const description = document.createElement("dd");
    term.textContent = name;
    description.textContent = value;
    return [term, description];
  }));
}

function wishesOf(request) {
  if (!ROUTES[request.route].calls) return "";
  const wishes = [request.fault || "no fault"];
  if (!request.dedup) wishes.push("no deduplication");
  if (!request.repeatable) wishes.push("not repeatable");
  return wishes.join(" · ");
}

function show(sent) {
  if (!sent.node) {
    sent.node = at("sent").content.cloneNode(true).querySelector("li");
    sent.node.querySelector("button").addEventListener("click", () => again(sent));
  }
  const { request, state, answers, node } = sent;
  const answer = answers.at(-1);
  const badge = node.querySelector(".badge");
  const { mood, headline } = verdict(seen(sent));
  node.querySelector("h3").textContent = `POST ${request.route}`;
  badge.textContent = state ? state.state.replace("_", " ") : "not stored";
  badge.className = `badge ${STATES[state?.state] ?? "bad"}`;
  node.querySelector(".wishes").textContent = wishesOf(request);
  node.querySelector(".fate").textContent = `${headline} · sent ${times(sent.times)}`;
  node.querySelector(".fate").className = `fate ${mood}`;
  const pairs = [["Key", request.key], ["Tenant", request.tenant]];
  if (answer) pairs.push(["Last response", `${answer.status || "none"} ${codeOf(answer)}${replayed(answer) ? " (replayed)" : ""}`]);
  if (state?.recovery_point) pairs.push(["Recovery point", state.recovery_point], ["Attempts", String(state.attempts)]);
  if (state?.last_error) pairs.push(["Last error", state.last_error]);
  if (state?.response) pairs.push(["Stored response", String(state.response.status)]);
  const stored = parsed(state?.response?.body ?? "");
  if (stored?.charge_id) pairs.push(["Charge", stored.charge_id]);
  describe(node.querySelector("dl"), pairs);
  return node;
}

async function follow() {
  await Promise.all(requests.filter((sent) => !isOver(sent)).map(look));
  showRequests();
}

function showRequests() {
  const nodes = requests.slice(0, NEWEST).map(show);
  nodes.forEach((node, place) => {
    // A node in its place is not moved: moving it would take the focus from its button.
    if (at("requests").children[place] !== node) at("requests").insertBefore(node, at("requests").children[place] ?? null);
  });
  while (at("requests").children.length > nodes.length) at("requests").lastElementChild.remove();
  at("no-requests").hidden = nodes.length > 0;
  keep();
}

function watch() {
  // A worker may change an unfinished key at any time: poll as long as there is one.
  if (polling !== null || requests.every(isOver)) return;
  polling = setTimeout(async () => {
    polling = null;
    await Promise.all([follow(), readLedger(), readRows()]);
    if (!busy) showVerdict();
    watch();
  }, POLL);
}

async function again(sent) {
  const { fault, ...rest } = sent.request;
  const title = fault ? `Again, without ${fault}` : "Again";
  await perform(async (request) => [await send(title, request)], { ...rest, fault: "" });
}

// The verdict, and the responses that it describes

const kind = (status) => (status === 202 || status === 409 || status === 503 ? "wait"
  : status >= 200 && status < 300 ? "good" : "bad");

function readable(text) {
  const data = parsed(text);
  return data === null ? text : JSON.stringify(data, null, 2);
}

function card(answer) {
  const node = at("answer").content.cloneNode(true);
  node.querySelector("h3").textContent = answer.title;
  const badge = node.querySelector(".badge");
  badge.textContent = `${answer.status || ""} ${answer.phrase}`.trim();
  badge.classList.add(kind(answer.status));
  node.querySelector(".chip").hidden = !replayed(answer);
  node.querySelector(".time").textContent = `${answer.took} ms`;
  describe(node.querySelector("dl"), answer.headers);
  node.querySelector("pre").textContent = readable(answer.text);
  return node;
}

function announce(mood, headline, text) {
  at("verdict").className = `verdict ${mood}`;
  // A screen reader would read the same text out again.
  if (at("headline").textContent !== headline) at("headline").textContent = headline;
  if (at("explanation").textContent !== text) at("explanation").textContent = text;
}

function showVerdict() {
  if (current === null) return;
  const { request, state, charges, rows } = current;
  const { mood, headline, text } = verdict(seen(current));
  announce(mood, headline, text);
  const effect = ROUTES[request.route].calls ? ["Charged", charges === null ? "?" : times(charges)] : ["Orders written", String(rows)];
  describe(at("counts"), [["Request", `POST ${request.route}`], ["Sent", times(current.times)], effect,
    ["Status", state ? state.state.replace("_", " ") : "not stored"]]);
  at("counts").hidden = false;
}

function showAnswers() {
  const answers = current?.answers ?? [];
  at("answers").replaceChildren(...answers.map(card));
  at("no-answers").hidden = answers.length > 0;
}

// The provider's ledger, and the shop's rows

const known = { ledger: null, rows: null, route: null, tenant: null };
let shown = { route: field.route.value, tenant: field.tenant.value };

function cell(text, kindOfCell = "") {
  const node = document.createElement("td");
  node.textContent = text ?? "";
  node.className = kindOfCell;
  return node;
}

function line(cells, kindOfRow) {
  const node = document.createElement("tr");
  node.className = kindOfRow;
  node.append(...cells.map((text) => cell(text)));
  return node;
}

function note(text, columns) {
  const node = document.createElement("tr");
  const only = cell(text, "none");
  only.colSpan = columns;
  node.append(only);
  return node;
}

const amount = (one) => `${(one.amount_cents / 100).toFixed(2)} ${one.currency}`;
const clock = (moment) => new Date(moment).toLocaleTimeString();

async function readLedger(mark = false) {
  try {
    const response = await fetch("/demo/ledger");
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const { charges } = await response.json();
    const before = known.ledger ?? new Set(charges.map((charge) => charge.id));
    const under = new Map();
    for (const { downstream_key: key } of charges) under.set(key, (under.get(key) ?? 0) + 1);
    const twice = (charge) => charge.downstream_key !== null && under.get(charge.downstream_key) > 1;
    at("ledger-count").textContent = counted(charges.length, "charge");
    const rows = charges.slice(-NEWEST).reverse().map((charge) => line(
      [charge.id, twice(charge) ? `${amount(charge)}, charged again` : amount(charge), charge.customer_id,
        charge.downstream_key ?? "none", clock(charge.at)], twice(charge) ? "twice" : before.has(charge.id) ? "" : "new"));
    at("ledger").replaceChildren(...(rows.length ? rows : [note("Nothing was charged yet.", 5)]));
    if (mark || known.ledger === null) known.ledger = new Set(charges.map((charge) => charge.id));
  } catch (error) {
    at("ledger").replaceChildren(note(`The ledger could not be read: ${error.message}`, 5));
  }
}

function what(one) {
  return one.items ? one.items.map((item) => `${item.quantity} × ${item.product_id}`).join(", ") : amount(one);
}

// Shows the rows of the selected or last used route and tenant; returns the number of rows since the last mark.
async function readRows(mark = false) {
  const { route, tenant } = shown;
  const { name } = ROUTES[route];
  at("rows-name").textContent = name ?? "Rows";
  at("rows-tenant").textContent = tenant;
  if (name === null) {
    at("rows").replaceChildren(note("Notifications leave no rows in the shop.", 6));
    return 0;
  }
  try {
    const response = await fetch(`${route}?limit=${NEWEST}`, { headers: { "Authorization": `Bearer ${tenant}` } });
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const listed = await response.json();
    const same = known.route === route && known.tenant === tenant;
    const fresh = (one) => same && !known.rows.has(one.id);
    const rows = listed.map((one) => line(
      [one.id, one.customer_id, what(one), one.status, one.charge_id, clock(one.created_at)], fresh(one) ? "new" : ""));
    at("rows").replaceChildren(...(rows.length ? rows : [note("None yet.", 6)]));
    const made = listed.filter(fresh).length;
    if (mark || !same) Object.assign(known, { route, tenant, rows: new Set(listed.map((one) => one.id)) });
    return made;
  } catch (error) {
    at("rows").replaceChildren(note(`The rows could not be read: ${error.message}`, 6));
    return 0;
  }
}

// The form

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function showCurl() {
  const request = written();
  const lines = Object.entries(headersOf(request)).map(([name, value]) => `  -H ${quoted(`${name}: ${value}`)}`);
  const address = `curl -i ${location.origin}${request.route}`;
  at("curl").textContent = [address, ...lines, `  -d ${quoted(request.body)}`].join(" \\\n");
}

function showRoute() {
  const route = ROUTES[field.route.value];
  at("route-hint").textContent = route.hint;
  at("delay-field").hidden = route.calls;
  at("faults").hidden = !route.calls;
  field.body.value = route.sample;
}

function choose() {
  shown = { route: field.route.value, tenant: field.tenant.value };
  readRows(true);
}

let busy = false;

async function perform(action, request) {
  if (busy) return;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  announce("", "Sending…", request.key === null ? `POST ${request.route} without a key.` : `POST ${request.route} with the key ${request.key}.`);
  try {
    shown = { route: request.route, tenant: request.tenant };
    await Promise.all([readLedger(true), readRows(true)]);
    const answers = await action(request);
    current.answers = answers;
    if (current.request.key !== null) await look(current);
    const [rows] = await Promise.all([readRows(), readLedger(), follow()]);
    current.rows += rows;
  } finally {
    busy = false;
    document.body.removeAttribute("aria-busy");
    showAnswers();
    showRequests();
    showVerdict();
    watch();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  perform(ACTIONS.twice, written());
});
form.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || busy) return;
  const { action, fault } = button.dataset;
  // Two requests can overlap only if there is no stored response for the key.
  if (fault || NEW_KEY.has(action)) takeNewKey();
  if (action && action !== "twice") perform(ACTIONS[action], written());
  if (fault) perform(ACTIONS.once, { ...written(), fault });
});
form.addEventListener("input", showCurl);
at("new-key").addEventListener("click", takeNewKey);
field.route.addEventListener("change", () => {
  showRoute();
  takeNewKey();
  choose();
});
field.tenant.addEventListener("change", choose);
at("refresh").addEventListener("click", () => Promise.all([readLedger(true), readRows(true), follow()]));

requests = restored();
current = requests[0] ?? null;
showRoute();
takeNewKey();
showAnswers();
readLedger();
choose();
follow().then(() => {
  showVerdict();
  watch();
});
