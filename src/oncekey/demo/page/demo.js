// The page of the demo: sends requests, and shows what came back beside what really happened.
// Everything that was received is shown as text.

const TELLING = ["Location", "Idempotency-Key", "Idempotent-Replayed", "Idempotency-Key-Expires", "Retry-After",
  "Content-Type"];
const NEWEST = 20;
const POLL = 1000;
const ORDER = `{
  "customer_id": "cus_1001",
  "items": [{ "product_id": "sku_teapot", "quantity": 2 }]
}`;
const MONEY = `{
  "customer_id": "cus_1001",
  "amount_cents": 1999,
  "currency": "EUR"
}`;
const ROUTES = {
  "/orders": { name: "Orders", sample: ORDER, calls: false,
    hint: "One transaction of the shop's own database; the provider has no part in it." },
  "/payments": { name: "Payments", sample: MONEY, calls: true,
    hint: "A row, a charge at the provider, a receipt: whoever comes next goes on where the last one stopped." },
  "/transfers": { name: "Transfers", sample: MONEY, calls: true,
    hint: "A row and a message; 202 until a worker has made the charge." },
  "/notifications": { name: null, sample: MONEY, calls: true,
    hint: "Calls the provider directly: what it does not hear, nobody knows." },
};

const at = (id) => document.getElementById(id);
const form = at("request");
const field = { route: at("route"), tenant: at("tenant"), delay: at("delay"), key: at("key"), body: at("body"),
  repeatable: at("repeatable"), dedup: at("dedup") };

// Keys

function newKey() {
  // randomUUID is missing where the page is not served from this machine; random bytes are always there.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
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
    const headers = TELLING.filter((name) => response.headers.has(name)).map((name) => [name, response.headers.get(name)]);
    answer = { title, status: response.status, phrase: response.statusText, headers, text, took: taken() };
  } catch (error) {
    answer = { title, status: 0, phrase: "No answer", headers: [], text: String(error), took: taken() };
  }
  if (sent) {
    sent.answer = answer;
    sent.times += 1;
  }
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
    await send("Second, another body", { ...request, body: altered(request) }),
  ],
  keyless: async (request) => [await send("Without a key", { ...request, key: null })],
};

// Answers

const replayed = (answer) => answer.headers.some(([name, value]) => name === "Idempotent-Replayed" && value === "true");
const waitOf = (answer) => (answer.headers.find(([name]) => name === "Retry-After") ?? ["", "1"])[1];
const kind = (status) => (status === 202 || status === 409 || status === 503 ? "wait"
  : status >= 200 && status < 300 ? "good" : "bad");

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const codeOf = (answer) => parsed(answer.text)?.code ?? "";

function readable(text) {
  const data = parsed(text);
  return data === null ? text : JSON.stringify(data, null, 2);
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

function ordered(count) {
  return count === 0 ? "No order was written." : count === 1 ? "One order was written." : `${count} orders were written.`;
}

function charged(count) {
  // Of all requests, not of this one alone: a charge that was delayed may be from an earlier one.
  const news = count === 0 ? "no new charge" : count === 1 ? "one new charge" : `${count} new charges`;
  return `The ledger has ${news}.`;
}

function sentence(route, answers, made) {
  const codes = answers.map(codeOf);
  const waiting = answers.find((answer, index) => codes[index] === "idempotency_key_in_progress");
  const effect = ROUTES[route].calls ? charged(made.charges) : ordered(made.rows);
  if (answers.some((answer) => answer.status === 0)) {
    return ["bad", "The server gave no answer. Retry with the same key: that is what it is for."];
  }
  if (codes.includes("idempotency_key_missing")) {
    return ["bad", `${effect} A retry without a key could not be told from a new request, so a key is required.`];
  }
  if (codes.includes("idempotency_key_reused_with_different_payload")) {
    return ["good", `${effect} The key belongs to the first body; another one is refused and changes nothing.`];
  }
  if (codes.includes("idempotency_outcome_unknown") || codes.includes("provider_failed")) {
    return ["bad", `${effect} The outcome is unknown to the shop, so nobody makes the call again.`];
  }
  if (codes.includes("idempotency_execution_failed")) {
    return ["wait", `${effect} The shop got no clear answer and may repeat the call: “Send again”, or a worker, goes on.`];
  }
  if (waiting && waiting.status !== 202) {
    return ["wait", `${effect} One request met the other while it was running: it may come back in `
      + `${waitOf(waiting)} s. “Send once” then gets the stored answer.`];
  }
  if (answers.some((answer) => answer.status === 202)) {
    return ["wait", "Accepted: a worker makes the call, and the list below follows it to its end."];
  }
  const same = answers.length === 2 && answers.every((answer) => answer.text === answers[0].text);
  if (same && answers.some(replayed)) {
    return ["good", `${effect} Both answers have the same bytes; the replayed ones are marked.`];
  }
  if (answers.length === 1 && replayed(answers[0])) {
    return ["good", `${effect} This is the stored answer of the first request.`];
  }
  return [answers.every((answer) => answer.status < 400) ? "good" : "bad", effect];
}

// The requests of this page, and what has become of their keys

const requests = [];
let polling = null;

function remember(request) {
  if (!request.key) return null;
  let sent = requests.find((one) => one.request.key === request.key && one.request.tenant === request.tenant);
  if (!sent) {
    sent = { request, state: null, answer: null, times: 0, node: null };
    requests.unshift(sent);
  }
  return sent;
}

const STATES = { completed: "good", in_progress: "wait", pending: "wait", failed_retryable: "wait", unknown: "bad" };
const isOver = (sent) => sent.state !== null && sent.state.state === "completed";

async function look(sent) {
  try {
    const response = await fetch(`/idempotency-keys/${encodeURIComponent(sent.request.key)}`,
      { headers: { "Authorization": `Bearer ${sent.request.tenant}` } });
    sent.state = response.ok ? await response.json() : null;
  } catch {
    sent.state = null;
  }
}

function show(sent) {
  if (!sent.node) {
    sent.node = at("sent").content.cloneNode(true).querySelector("li");
    sent.node.querySelector("button").addEventListener("click", () => again(sent));
  }
  const { request, state, answer, node } = sent;
  node.querySelector("h3").textContent = `POST ${request.route}`;
  const badge = node.querySelector(".badge");
  badge.textContent = state ? state.state.replace("_", " ") : "not stored";
  badge.className = `badge ${STATES[state?.state] ?? "bad"}`;
  const wishes = [request.fault || "no fault"];
  if (!request.repeatable) wishes.push("not repeatable");
  if (!request.dedup) wishes.push("no deduplication");
  node.querySelector(".wishes").textContent = ROUTES[request.route].calls ? wishes.join(" · ") : "no provider";
  const stored = parsed(state?.response?.body ?? "");
  const pairs = [["Key", request.key], ["Sent", `${sent.times} ×`]];
  if (answer) pairs.push(["Last answer", `${answer.status || "none"} ${codeOf(answer)}${replayed(answer) ? " (replayed)" : ""}`]);
  if (state) pairs.push(["Recovery point", state.recovery_point], ["Attempts", String(state.attempts)]);
  if (state?.last_error) pairs.push(["Last error", state.last_error]);
  if (state?.response) pairs.push(["Stored answer", String(state.response.status)]);
  if (stored?.charge_id) pairs.push(["Charge", stored.charge_id]);
  describe(node.querySelector("dl"), pairs);
  return node;
}

async function follow() {
  await Promise.all(requests.filter((sent) => !isOver(sent)).map(look));
  const nodes = requests.slice(0, NEWEST).map(show);
  nodes.forEach((node, place) => {
    // A node that is where it belongs is not moved: moving it would take the focus from its button.
    if (at("requests").children[place] !== node) at("requests").insertBefore(node, at("requests").children[place] ?? null);
  });
  while (at("requests").children.length > nodes.length) at("requests").lastElementChild.remove();
  at("no-requests").hidden = nodes.length > 0;
}

function watch() {
  // A key that a worker is busy with changes without us; as long as there is one, we look.
  if (polling !== null || requests.every(isOver)) return;
  polling = setTimeout(async () => {
    polling = null;
    await Promise.all([follow(), readLedger(), readRows()]);
    watch();
  }, POLL);
}

async function again(sent) {
  const { fault, ...rest } = sent.request;
  await perform(async (request) => [await send(`Again, without ${fault || "a fault"}`, request)], { ...rest, fault: "" });
}

// What really happened: the provider's ledger, and the rows of the shop

const known = { ledger: null, rows: null, route: null, tenant: null };

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
    const fresh = (charge) => !before.has(charge.id);
    const twice = (charge) => charge.downstream_key !== null
      && charges.some((other) => other.id !== charge.id && other.downstream_key === charge.downstream_key);
    at("ledger-count").textContent = String(charges.length);
    const rows = charges.slice(-NEWEST).reverse().map((charge) => line(
      [charge.id, twice(charge) ? `${amount(charge)}, charged twice` : amount(charge), charge.customer_id,
        charge.downstream_key ?? "none", clock(charge.at)], twice(charge) ? "twice" : fresh(charge) ? "new" : ""));
    at("ledger").replaceChildren(...(rows.length ? rows : [note("Nothing was charged yet.", 5)]));
    if (mark || known.ledger === null) known.ledger = new Set(charges.map((charge) => charge.id));
    return charges.filter(fresh).length;
  } catch (error) {
    at("ledger").replaceChildren(note(`The ledger could not be read: ${error.message}`, 5));
    return 0;
  }
}

function what(one) {
  return one.items ? one.items.map((item) => `${item.quantity} × ${item.product_id}`).join(", ") : amount(one);
}

async function readRows(mark = false) {
  const route = field.route.value;
  const tenant = field.tenant.value;
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

let busy = false;

async function perform(action, request) {
  if (busy) return;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  at("verdict").className = "verdict";
  at("verdict").textContent = "Sending…";
  try {
    await Promise.all([readLedger(true), readRows(true)]);
    const sending = action(request);
    await follow();
    const answers = await sending;
    at("answers").replaceChildren(...answers.map(card));
    at("no-answers").hidden = true;
    const [charges, rows] = await Promise.all([readLedger(), readRows(), follow()]);
    const [mood, words] = sentence(request.route, answers, { charges, rows });
    at("verdict").classList.add(mood);
    at("verdict").textContent = words;
  } finally {
    busy = false;
    document.body.removeAttribute("aria-busy");
    watch();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  perform(ACTIONS.twice, written());
});
form.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { action, fault } = button.dataset;
  if (action && action !== "twice") perform(ACTIONS[action], written());
  if (fault) perform(ACTIONS.once, { ...written(), key: newKey(), fault });
});
form.addEventListener("input", showCurl);
at("new-key").addEventListener("click", () => {
  field.key.value = newKey();
  showCurl();
});
field.route.addEventListener("change", () => {
  field.key.value = newKey();
  showRoute();
  showCurl();
  readRows(true);
});
field.tenant.addEventListener("change", () => readRows(true));
at("refresh").addEventListener("click", () => Promise.all([readLedger(true), readRows(true), follow()]));

field.key.value = newKey();
showRoute();
showCurl();
readLedger();
readRows(true);
