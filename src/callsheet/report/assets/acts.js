// What is shown of a run's life, and the buttons that ask it for something.

function lifeOf() {
  const { run } = data;
  if (run.outcome === "running") return [true, "live"];
  return [false, isNumber(run.ended) && run.outcome !== "lost" ? `ended ${moment(run.ended)}` : `silent since ${moment(run.last_write)}`];
}

function why() {
  return data.no_acts ?? pageData.live.no_acts ?? "";
}

function liveControls() {
  if (pageData.live === null) return null;
  const off = why();
  const button = (act, text) => el("button", { type: "button", id: `act-${act}`, class: act, disabled: Boolean(off), on: { click: () => (act === "stop" ? confirmStop() : ask(act)) } }, text);
  return el("div", { class: "live" },
    lifeSigns(),
    button("save", "Save a checkpoint"), button("evaluate", "Evaluate"), button("stop", "Stop"),
    el("span", { class: "why soft small", id: "said", role: "status" }, off || said));
}

let said = "";

async function ask(act) {
  say(`Asking the run: ${act} ...`);
  try {
    const answer = await request(pageData.live.act, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ act }) });
    const text = await answer.text();
    let message = text;
    try { message = JSON.parse(text).message ?? text; } catch { /* a plain text, shown as it is */ }
    say(answer.ok ? message || `The run was asked: ${act}.` : `That did not work: ${message || answer.status}`);
  } catch {
    say("The server does not answer.");
  }
}

function say(text) {
  said = text;
  const place = document.getElementById("said");
  if (place) place.textContent = text;
}

function confirmStop() {
  const dialog = el("dialog", { "aria-labelledby": "stop-title" },
    el("h2", { id: "stop-title" }, "Stop this run?"),
    el("p", {}, `${named(data.run.name)} ends its step, does what is due at the end, and is over. It can be resumed from a checkpoint.`),
    el("form", { method: "dialog", class: "row" }, el("button", { value: "no" }, "Go on training"), el("button", { value: "stop", class: "stop", id: "confirm-stop" }, "Stop the run")));
  dialog.addEventListener("close", () => { if (dialog.returnValue === "stop") ask("stop"); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
}
