// The status of a live run, and the buttons that send requests to it.

/** Returns whether the run is running, and a text about its status. */
function liveStatus() {
  const { run } = data;
  if (run.outcome === "running") return [true, "live"];
  return [false, isNumber(run.ended) && run.outcome !== "lost" ? `ended ${dateTime(run.ended)}` : `no data since ${dateTime(run.last_write)}`];
}

/** Why the buttons are disabled; an empty string if they are enabled. */
function disabledReason() {
  return data.disabled_reason ?? pageData.live.disabled_reason ?? "";
}

function liveControls() {
  if (pageData.live === null) return null;
  const reason = disabledReason();
  const button = (act, text) => el("button", { type: "button", id: `act-${act}`, class: act, disabled: Boolean(reason), on: { click: () => (act === "stop" ? confirmStop() : sendRequest(act)) } }, text);
  return el("div", { class: "live" },
    statusIndicator(),
    button("save", "Save a checkpoint"), button("evaluate", "Evaluate"), button("stop", "Stop"),
    el("span", { class: "message soft small", id: "request-message", role: "status" }, reason || requestMessage));
}

let requestMessage = "";

async function sendRequest(act) {
  showMessage(`Sending the request: ${act} ...`);
  try {
    const answer = await request(pageData.live.act, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ act }) });
    const text = await answer.text();
    let message = text;
    try { message = JSON.parse(text).message ?? text; } catch { /* the answer is not JSON: show its text */ }
    showMessage(answer.ok ? message || `Requested: ${act}.` : `The request failed: ${message || answer.status}`);
  } catch {
    showMessage("The server does not answer.");
  }
}

function showMessage(text) {
  requestMessage = text;
  const element = document.getElementById("request-message");
  if (element) element.textContent = text;
}

function confirmStop() {
  const dialog = el("dialog", { "aria-labelledby": "stop-title" },
    el("h2", { id: "stop-title" }, "Stop this run?"),
    el("p", {}, `${displayName(data.run.name)} finishes the current step, does the work that is due at the end of a run, and stops. It can be resumed from a checkpoint.`),
    el("form", { method: "dialog", class: "row" }, el("button", { value: "no" }, "Continue training"), el("button", { value: "stop", class: "stop", id: "confirm-stop" }, "Stop the run")));
  dialog.addEventListener("close", () => { if (dialog.returnValue === "stop") sendRequest("stop"); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
}
