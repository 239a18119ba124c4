// Shows what a mark stands for: under the pointer, after a tap, and for the arrow keys inside a focused chart.
const tip = document.getElementById("tip");
const spoken = document.getElementById("spoken");
let current = null;

function show(mark) {
  if (current) current.classList.remove("on");
  current = mark;
  tip.textContent = mark ? mark.dataset.tip : "";
  if (!mark) return;
  mark.classList.add("on");
  place(mark);
}

function place(mark) {
  const box = mark.getBoundingClientRect();
  const left = Math.min(Math.max(box.left + box.width / 2 - tip.offsetWidth / 2, 8), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = left + "px";
  tip.style.top = (above > 4 ? above : box.bottom + 6) + "px";
}

const markUnder = (event) => (event.target.closest ? event.target.closest("[data-tip]") : null);
document.addEventListener("pointerover", (event) => show(markUnder(event)));
document.addEventListener("click", (event) => show(markUnder(event)));
document.addEventListener("scroll", () => current && place(current), { passive: true, capture: true });

// In a drawing the browser would show titles by itself, later and elsewhere than other hints.
for (const title of document.querySelectorAll(".drawing title")) {
  title.parentElement.dataset.tip = title.textContent;
  title.remove();
}

for (const chart of document.querySelectorAll(".bars, .drawing")) {
  const rows = [...chart.querySelectorAll(".row")].map((row) => [...row.querySelectorAll("[data-tip]")]);
  const filled = rows.filter((row) => row.length);
  let row = 0;
  let column = 0;
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  chart.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    const move = moves[event.key];
    if (!move || !filled.length) return;
    event.preventDefault();
    if (current && chart.contains(current)) {
      row = Math.min(Math.max(row + move[0], 0), filled.length - 1);
      column = Math.min(Math.max(column + move[1], 0), filled[row].length - 1);
    }
    const mark = filled[row][Math.min(column, filled[row].length - 1)];
    mark.scrollIntoView({ block: "nearest", inline: "nearest" });
    show(mark);
    const label = mark.closest(".row").querySelector(".label");
    spoken.textContent = label.textContent + ", " + mark.dataset.tip;
  });
  chart.addEventListener("blur", () => show(null));
}
