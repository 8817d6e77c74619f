// The page of the demo: sends orders and shows what came back. Everything that was received is shown as text.

const TELLING = ["Location", "Idempotency-Key", "Idempotent-Replayed", "Idempotency-Key-Expires", "Retry-After",
  "Content-Type"];
const NEWEST = 20;
const SAMPLE = `{
  "customer_id": "cus_1001",
  "items": [{ "product_id": "sku_teapot", "quantity": 2 }]
}`;

const at = (id) => document.getElementById(id);
const form = at("request");
const field = { tenant: at("tenant"), delay: at("delay"), key: at("key"), body: at("body") };

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
  return { tenant: field.tenant.value, key: field.key.value, delay: field.delay.value, body: field.body.value };
}

function headersOf(request) {
  const headers = { "Authorization": `Bearer ${request.tenant}`, "Content-Type": "application/json" };
  if (request.key !== null) headers["Idempotency-Key"] = request.key;
  if (Number(request.delay) > 0) headers["X-Demo-Delay"] = request.delay;
  return headers;
}

async function send(title, request) {
  const began = performance.now();
  const taken = () => Math.round(performance.now() - began);
  try {
    const response = await fetch("/orders", { method: "POST", headers: headersOf(request), body: request.body });
    const text = await response.text();
    const headers = TELLING.filter((name) => response.headers.has(name)).map((name) => [name, response.headers.get(name)]);
    return { title, status: response.status, phrase: response.statusText, headers, text, took: taken() };
  } catch (error) {
    return { title, status: 0, phrase: "No answer", headers: [], text: String(error), took: taken() };
  }
}

function altered(body) {
  try {
    const order = JSON.parse(body);
    order.items[0].quantity += 1;
    return JSON.stringify(order, null, 2);
  } catch {
    return SAMPLE.replace("cus_1001", "cus_2002");
  }
}

const ACTIONS = {
  once: async (request) => [await send("The request", request)],
  twice: async (request) => [await send("First", request), await send("Second", request)],
  together: (request) => Promise.all([send("First", request), send("Second", request)]),
  altered: async (request) => [
    await send("First", request),
    await send("Second, another body", { ...request, body: altered(request.body) }),
  ],
  keyless: async (request) => [await send("Without a key", { ...request, key: null })],
};

// Answers

const replayed = (answer) => answer.headers.some(([name, value]) => name === "Idempotent-Replayed" && value === "true");
const waitOf = (answer) => (answer.headers.find(([name]) => name === "Retry-After") ?? ["", "1"])[1];
const kind = (status) => (status >= 200 && status < 300 ? "good" : status === 409 || status === 503 ? "wait" : "bad");

function codeOf(answer) {
  try {
    return JSON.parse(answer.text).code ?? "";
  } catch {
    return "";
  }
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function card(answer) {
  const node = at("answer").content.cloneNode(true);
  node.querySelector("h3").textContent = answer.title;
  const badge = node.querySelector(".badge");
  badge.textContent = `${answer.status || ""} ${answer.phrase}`.trim();
  badge.classList.add(kind(answer.status));
  node.querySelector(".chip").hidden = !replayed(answer);
  node.querySelector(".time").textContent = `${answer.took} ms`;
  for (const [name, value] of answer.headers) {
    const term = document.createElement("dt");
    const description = document.createElement("dd");
    term.textContent = name;
    description.textContent = value;
    node.querySelector("dl").append(term, description);
  }
  node.querySelector("pre").textContent = readable(answer.text);
  return node;
}

function orders(count) {
  return count === 0 ? "No order was written." : count === 1 ? "One order was written." : `${count} orders were written.`;
}

function sentence(answers, made) {
  const codes = answers.map(codeOf);
  const waiting = answers.find((answer, index) => codes[index] === "idempotency_key_in_progress");
  if (answers.some((answer) => answer.status === 0)) {
    return ["bad", "The server gave no answer. Retry with the same key: that is what it is for."];
  }
  if (codes.includes("idempotency_key_missing")) {
    return ["bad", `${orders(made)} A retry without a key could not be told from a new order, so a key is required.`];
  }
  if (codes.includes("idempotency_key_reused_with_different_payload")) {
    return ["good", `${orders(made)} The key belongs to the first body; another one is refused and changes nothing.`];
  }
  if (waiting) {
    return ["wait", `${orders(made)} One request met the other while it was running: it may come back in `
      + `${waitOf(waiting)} s. “Send once” now gets the stored answer.`];
  }
  const same = answers.length === 2 && answers.every((answer) => answer.text === answers[0].text);
  if (same && answers.some(replayed)) {
    return ["good", `${orders(made)} Both answers have the same bytes; the replayed ones are marked.`];
  }
  if (answers.length === 1 && replayed(answers[0])) {
    return ["good", `${orders(made)} This is the stored answer of the first request.`];
  }
  return [answers.every((answer) => answer.status < 400) ? "good" : "bad", orders(made)];
}

// Orders

let known = { tenant: null, ids: new Set() };

function cell(text, kindOfCell = "") {
  const node = document.createElement("td");
  node.textContent = text;
  node.className = kindOfCell;
  return node;
}

function row(order, fresh) {
  const node = document.createElement("tr");
  node.className = fresh ? "new" : "";
  const items = order.items.map((item) => `${item.quantity} × ${item.product_id}`).join(", ");
  const placed = new Date(order.created_at).toLocaleTimeString();
  node.append(cell(order.id), cell(order.customer_id), cell(items), cell(order.status), cell(placed));
  return node;
}

async function refresh() {
  const tenant = field.tenant.value;
  at("orders-tenant").textContent = tenant;
  let rows = [];
  let made = 0;
  try {
    const response = await fetch(`/orders?limit=${NEWEST}`, { headers: { "Authorization": `Bearer ${tenant}` } });
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const listed = await response.json();
    const fresh = (order) => known.tenant === tenant && !known.ids.has(order.id);
    made = listed.filter(fresh).length;
    rows = listed.map((order) => row(order, fresh(order)));
    known = { tenant, ids: new Set(listed.map((order) => order.id)) };
  } catch (error) {
    rows = [note(`The orders could not be read: ${error.message}`)];
  }
  at("orders").replaceChildren(...(rows.length ? rows : [note("No orders yet.")]));
  return made;
}

function note(text) {
  const node = document.createElement("tr");
  const only = cell(text, "none");
  only.colSpan = 5;
  node.append(only);
  return node;
}

// The form

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function showCurl() {
  const request = written();
  const lines = Object.entries(headersOf(request)).map(([name, value]) => `  -H ${quoted(`${name}: ${value}`)}`);
  at("curl").textContent = [`curl -i ${location.origin}/orders`, ...lines, `  -d ${quoted(request.body)}`].join(" \\\n");
}

async function perform(action) {
  const buttons = form.querySelectorAll("button");
  buttons.forEach((button) => { button.disabled = true; });
  at("verdict").className = "verdict";
  at("verdict").textContent = "Sending…";
  try {
    await refresh();
    const answers = await ACTIONS[action](written());
    at("answers").replaceChildren(...answers.map(card));
    const [mood, words] = sentence(answers, await refresh());
    at("verdict").classList.add(mood);
    at("verdict").textContent = words;
  } finally {
    buttons.forEach((button) => { button.disabled = false; });
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  perform("twice");
});
form.addEventListener("click", (event) => {
  const action = event.target.dataset.action;
  if (action && action !== "twice") perform(action);
});
form.addEventListener("input", showCurl);
at("new-key").addEventListener("click", () => {
  field.key.value = newKey();
  showCurl();
});
field.tenant.addEventListener("change", refresh);
at("refresh").addEventListener("click", refresh);

field.key.value = newKey();
field.body.value = SAMPLE;
showCurl();
refresh();
