// Cells that begin with a number are sorted by it, other cells come after them by their text.
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  const text = row => row.cells[head.cellIndex].textContent;
  const number = row => text(row) ? Number(text(row).split(/ ± | \(|\*| %/)[0].replaceAll(",", "")) : NaN;
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (isNaN(x) && isNaN(y)) return sign * text(a).localeCompare(text(b));
    return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
  };
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  for (const row of [...body.rows].sort(compare)) body.append(row);
});
