// A page that is served live asks for news. The script of the page says in `lifeOf` what is known of the runs: whether one is running, and a few words.

let answered = Date.now();
let reachable = true;

function request(path, options = {}) {
  return fetch(path, { ...options, cache: "no-store", credentials: "same-origin", headers: { ...options.headers, "X-Callsheet-Token": pageData.live.token } });
}

/** Whether the reader is dragging or pressing something, which must not be made again now. */
const isBusy = () => main.matches(":active");

/** Renders news without moving what the reader looks at, whatever grows above it. */
function renderInPlace() {
  const seen = document.elementFromPoint(innerWidth / 2, innerHeight / 3)?.closest(".chart-card, section");
  const before = seen?.getBoundingClientRect().top;
  render(true);
  const now = seen?.isConnected ? seen : document.getElementById(seen?.id);
  if (now) scrollBy({ top: now.getBoundingClientRect().top - before, behavior: "instant" });
}

async function poll() {
  try {
    const answer = await request(`${pageData.live.poll}?since=${encodeURIComponent(data.version)}`);
    reachable = answer.ok || answer.status === 304;
    if (answer.status === 200) {
      const news = await answer.json();
      if (!isBusy()) { data = news; renderInPlace(); } // otherwise they come again, as `data` keeps its version
    }
    if (reachable) answered = Date.now();
  } catch {
    reachable = false;
  }
  showLife();
  const pause = pageData.live.seconds * (document.hidden ? 5 : reachable ? 1 : 2);
  setTimeout(poll, 1000 * pause);
}

/** The element for the life of the runs; a page that is a file has none. */
const lifeSigns = () => [el("span", { class: "dot", id: "life", "aria-hidden": "true" }), el("span", { class: "soft small", id: "life-said" })];

function showLife() {
  const dot = document.getElementById("life");
  if (!dot) return;
  const [isLive, text] = lifeOf();
  dot.classList.toggle("off", !reachable);
  dot.classList.toggle("over", reachable && !isLive);
  document.getElementById("life-said").textContent = reachable ? text : `no answer since ${moment(answered / 1000)}`;
}

/** Starts to ask for news, if the page has a server. */
function goLive() {
  if (pageData.live === null) return;
  document.documentElement.style.overflowAnchor = "none"; // `renderInPlace` does it, in all browsers
  setTimeout(poll, 1000 * pageData.live.seconds);
}
