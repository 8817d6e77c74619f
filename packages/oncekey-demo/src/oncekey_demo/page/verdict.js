// The verdict on a request in words: a pure function of its responses, its key's state and its charges at the provider.
// It is computed again whenever one of them changes.

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
  return `${capital(spelled(count))} ${noun}${count === 1 ? "" : "s"}`;
}

// The effects of this one request in words; `charges` is null if the provider does not respond.
function effectOf({ calls, charges, rows }) {
  if (!calls) return counted(rows, "order");
  return charges === null ? "Charges unknown" : counted(charges, "charge");
}

function ledgerSentence(charges) {
  if (charges === null) return "The provider's ledger cannot be read right now.";
  return charges === 0 ? "The provider's ledger has no charge for it." : "The provider's ledger has one charge for it.";
}

function twiceCharged(charges, repeatable) {
  const why = repeatable
    ? " The shop declared the call repeatable, but the provider did not deduplicate it. Declare a call repeatable only if"
      + " the provider deduplicates by key; otherwise the shop marks the outcome as unknown instead of calling again."
    : "";
  return { mood: "bad", headline: `Charged ${times(charges)}`,
    text: `The provider has ${spelled(charges)} charges for this one request.${why}` };
}

function refused(code, answer, effect) {
  switch (code) {
    case "idempotency_key_missing":
      return { mood: "bad", headline: "Refused: no key",
        text: "Nothing was executed. Without a key the server cannot distinguish a retry from a new request." };
    case "idempotency_key_reused_with_different_payload":
      return { mood: "good", headline: `${effect}; the other body was refused`,
        text: "The key belongs to the first body. The second request received 422 and changed nothing." };
    default:
      return { mood: "bad", headline: `Refused: ${answer.status} ${answer.phrase}`.trim(),
        text: parsed(answer.text)?.detail ?? "Nothing was executed." };
  }
}

// The request was refused before it began, so the server has no record of it.
const TURNED_AWAY = (answer, state) => state === null && answer.status >= 400 && answer.status < 500;

function ended(effect, { state, answers, charges, calls, route }) {
  const status = state.response?.status ?? 0;
  if (status >= 400) {
    return { mood: charges > 0 ? "bad" : "good", headline: `${effect}: final response ${status}`,
      text: "The response is final and stored; every retry receives it." };
  }
  const last = answers.at(-1);
  const same = answers.length === 2 && answers[0].text === answers[1].text;
  const met = answers.find((answer) => codeOf(answer) === "idempotency_key_in_progress" && answer.status !== 202);
  const noun = { "/transfers": "transfer", "/payments": "payment", "/notifications": "notification" }[route] ?? "order";
  let text = "The response is stored; every retry receives it.";
  if (same && answers.some(replayed)) {
    text = "Both responses have the same bytes; the replayed one is marked.";
  } else if (met) {
    text = "One request arrived while the other one ran: it executed nothing and received 409 with Retry-After"
      + ` ${waitOf(met)} s. “Send once” returns the stored response.`;
  } else if (answers.some((answer) => answer.status === 202)) {
    text = "A worker made the charge after the request was accepted. “Send again” returns the stored response.";
  } else if (last && (last.status === 0 || last.status >= 409)) {
    text = last.status === 0 ? "The client received no response" : `The client received ${last.status}`;
    text += ", and the server finished the request without it. “Send again” returns the stored response.";
  } else if (last && replayed(last)) {
    text = "The request was completed before. This is the stored response; nothing ran again.";
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
        text: `The reply to a non-repeatable call was lost, so the shop does not call again. ${ledgerSentence(charges)}`
          + " The provider's webhook, the reconciler or an operator resolves it; this page updates itself." };
    case "failed_retryable":
      return { mood: "wait", headline: "Interrupted: will be resumed",
        text: `${ledgerSentence(charges)} The provider's reply was lost; the call can be repeated with the same downstream key.`
          + " “Send again” resumes it now; otherwise a worker does." };
    case "in_progress":
    case "pending":
      return { mood: "wait", headline: answers.some((answer) => answer.status === 202) ? "Accepted" : "In progress",
        text: `${calls ? ledgerSentence(charges) : ""} The request is in progress; this page updates itself.`.trim() };
    default:
      return unrecorded(answers.at(-1));
  }
}

// The server has no record of the key, or did not return it.
function unrecorded(last) {
  if (!last) return { mood: "wait", headline: "Not stored", text: "The server has no record of this key." };
  if (last.status === 0) {
    return { mood: "bad", headline: "No response",
      text: "The server did not respond. Retry with the same key: that is safe." };
  }
  return { mood: "bad", headline: `Response: ${last.status} ${last.phrase}`.trim(),
    text: parsed(last.text)?.detail ?? "Retry with the same key." };
}
