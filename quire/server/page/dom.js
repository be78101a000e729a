/** An element: tag, properties, children. Text is always text, never markup. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") || name === "role" || name === "scope") node.setAttribute(name, value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export const number = (value) => value.toLocaleString("en-US");

export const percent = (share) => {
  const value = 100 * share;
  return value && value < 10 ? value.toFixed(1) : Math.round(value).toString();
};

export const milliseconds = (seconds) => {
  const ms = 1000 * seconds;
  if (ms >= 9950) return `${Math.round(seconds)} s`;
  if (ms >= 995) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`;
};

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
