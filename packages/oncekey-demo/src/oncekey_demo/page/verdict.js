// What a request came to, in words: a pure function of what was answered, what its key's status says, and what the
// provider has charged for it. It is asked again whenever one of them changes.

export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export const codeOf = (answer) => parsed(answer.text)?.code ?? "";
export const replayed = (answer) => answer.headers.some(([name, value]) => name === "Idempotent-Replayed" && value === "true");
const waitOf = (answer) => (answer.headers.find(([name]) => name === "Retry-After") ?? ["", "1"])[1];

const NUMBERS = ["no", "one", "two", "three", "four", "five"];
const TIMES = ["never", "once", "twice"];
const spelled = (count) => NUMBERS[count] ?? String(count);
export const times = (count) => TIMES[count] ?? `${spelled(count)} times`;
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export function counted(count, noun) {
  return `${capital(spelled(count))} ${noun}${count > 1 ? "s" : ""}`;
}

// How the effects of this one request are said; null where the provider cannot be asked.
function effectOf({ calls, charges, rows }) {
  if (!calls) return counted(rows, "order");
  return charges === null ? "Charges unknown" : counted(charges, "charge");
}

function ledgerSays(charges) {
  if (charges === null) return "The provider's ledger cannot be read now.";
  return charges === 0 ? "The provider's ledger has no charge for it." : "The provider's ledger has one charge for it.";
}

function twiceCharged(charges, repeatable) {
  const why = repeatable
    ? " The shop relied on a provider that recognises a key it has seen, and this one did not. That promise"
      + " (repeatable) must be true; without it the shop stops at “unknown” instead of calling again."
    : "";
  return { mood: "bad", headline: `Charged ${times(charges)}`,
    text: `The provider has ${spelled(charges)} charges for this one request.${why}` };
}

function refused(code, answer, effect) {
  switch (code) {
    case "idempotency_key_missing":
      return { mood: "bad", headline: "Refused: no key",
        text: "Nothing was executed. The server could not tell a retry without a key from a new request." };
    case "idempotency_key_reused_with_different_payload":
      return { mood: "good", headline: `${effect}; the other body was refused`,
        text: "The key belongs to the first body. The second one got 422 and changed nothing." };
    default:
      return { mood: "bad", headline: `Refused: ${answer.status} ${answer.phrase}`.trim(),
        text: parsed(answer.text)?.detail ?? "Nothing was executed." };
  }
}

// Answers that leave no record of their own: the request was turned away before it began.
const TURNED_AWAY = (answer, state) => state === null && answer.status >= 400 && answer.status < 500;

function ended(effect, { state, answers, charges, calls, route }) {
  const status = state.response?.status ?? 0;
  if (status >= 400) {
    return { mood: charges > 0 ? "bad" : "good", headline: `${effect}: answered ${status}`,
      text: "This is the final answer. It is stored, and every retry gets it." };
  }
  const last = answers.at(-1);
  const same = answers.length === 2 && answers[0].text === answers[1].text;
  const met = answers.find((answer) => codeOf(answer) === "idempotency_key_in_progress" && answer.status !== 202);
  const noun = { "/transfers": "transfer", "/payments": "payment", "/notifications": "notification" }[route] ?? "order";
  let text = "Its answer is stored, and every retry gets it.";
  if (same && answers.some(replayed)) {
    text = "Both answers have the same bytes; the one that was replayed is marked.";
  } else if (met) {
    text = "One request came while the other one ran: it executed nothing and was asked to come back after"
      + ` ${waitOf(met)} s. “Send once” gets the stored answer.`;
  } else if (answers.some((answer) => answer.status === 202)) {
    text = "A worker made the charge after the request was accepted. “Send again” gets the stored answer.";
  } else if (last && (last.status === 0 || last.status >= 409)) {
    text = `The client's last answer was ${last.status || "none"}, and the request was finished without it. “Send again”`
      + " gets the stored answer.";
  } else if (last && replayed(last)) {
    text = "It was completed before. This is the stored answer, and nothing ran again.";
  }
  return { mood: calls && charges === 0 ? "bad" : "good", headline: `${effect}: ${noun} completed`, text };
}

export function verdict(seen) {
  const { answers, state, charges, calls, repeatable } = seen;
  const effect = effectOf(seen);
  const codes = answers.map(codeOf);
  const other = codes.indexOf("idempotency_key_reused_with_different_payload");
  const turnedAway = answers.find((answer) => TURNED_AWAY(answer, state));
  if (calls && charges > 1) return twiceCharged(charges, repeatable);
  if (other >= 0) return refused(codes[other], answers[other], effect);
  if (turnedAway) return refused(codeOf(turnedAway), turnedAway, effect);
  switch (state?.state) {
    case "completed":
      return ended(effect, seen);
    case "unknown":
      return { mood: "bad", headline: "Outcome unknown",
        text: `The shop got no clear answer and may not repeat the call, so it holds the request. ${ledgerSays(charges)}`
          + " The provider's webhook, the reconciler or an operator settles it; this page follows." };
    case "failed_retryable":
      return { mood: "wait", headline: "Interrupted, not lost",
        text: `${ledgerSays(charges)} The shop got no clear answer and may repeat the call with the same downstream key.`
          + " “Send again” goes on now; otherwise a worker does." };
    case "in_progress":
    case "pending":
      return { mood: "wait", headline: answers.some((answer) => answer.status === 202) ? "Accepted" : "In progress",
        text: `${calls ? ledgerSays(charges) : ""} The request is being worked on; this page follows it to its end.`.trim() };
    default:
      return unrecorded(answers.at(-1));
  }
}

// The server has no record of the key, or cannot be asked for it.
function unrecorded(last) {
  if (!last) return { mood: "wait", headline: "Not stored", text: "The server has no record of this key now." };
  if (last.status === 0) {
    return { mood: "bad", headline: "No answer",
      text: "The server gave no answer. Send again with the same key: that is what it is for." };
  }
  return { mood: "bad", headline: `Answered ${last.status} ${last.phrase}`.trim(),
    text: parsed(last.text)?.detail ?? "Send again with the same key." };
}
