// The shop on Express behind express-idempotency, as its README shows it: the middleware before every POST, with its defaults (keys in
// memory), `isHit` at the beginning of the handler, and `reportError` for a failure. NODE_PATH names the folder of both packages.
// counted.py tells what a shop takes; this one, too, prints its port and ends with its standard input.
"use strict";

const { randomUUID } = require("node:crypto");
const express = require("express");
const { getSharedIdempotencyService, idempotency } = require("express-idempotency");

const CALLERS = { "Bearer alpha": "alpha", "Bearer beta": "beta" };
const orders = [];
const app = express();

function known(request, response) {
  const caller = CALLERS[request.get("Authorization")];
  if (!caller) {
    response.status(401).send({ detail: "unauthorized" });
  }
  return caller;
}

app.use(express.json());
app.post("*", idempotency());

app.post("/orders", async (request, response, next) => {
  const service = getSharedIdempotencyService();
  if (service.isHit(request)) {
    return;
  }
  const caller = known(request, response);
  if (!caller) {
    return;
  }
  const { item, quantity } = request.body;
  if (typeof item !== "string" || !Number.isInteger(quantity)) {
    response.status(422).send({ detail: "incomplete" });
    return;
  }
  await new Promise((resolve) => setTimeout(resolve, 1000 * Number(request.get("X-Slow") ?? 0)));
  if (request.get("X-Fail")) {
    await service.reportError(request);
    next(new Error("it was told to fail"));
    return;
  }
  const order = { id: randomUUID(), status: "placed" };
  orders.push(caller);
  response.status(201).location(`/orders/${order.id}`).send(order);
});

app.get("/orders", (request, response) => {
  const caller = known(request, response);
  if (caller) {
    response.send({ total: orders.filter((owner) => owner === caller).length });
  }
});

const server = app.listen(0, "127.0.0.1", () => console.log(server.address().port));
process.stdin.on("end", () => process.exit(1)).resume();
