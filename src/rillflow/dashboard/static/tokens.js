// The tokens of one sample, coloured by version, advantage or the difference of log-probs; masked ones are dimmed.
import { h, number, select } from "./dom.js";

const COLOURS = [["version", "version"], ["advantage", "advantage"], ["difference", "trainer − engine log-prob"], ["logprob", "log-prob"], ["none", "nothing"]];

export async function tokenView(data, sample, context) {
  const { get, args, set } = context();
  const colour = args.get("colour") || (data.info.oldest !== data.info.newest ? "version" : "advantage");
  const text = h("div", { class: "tokens mono" }), more = h("div", { class: "toolbar" }), scale = h("p", { class: "soft" });
  const names = data.samples.map((one, index) => [String(index), `${index + 1}: ${one.role || one.policy}, ${one.trained} of ${one.tokens} train${one.fork ? `, forked (${one.fork})` : ""}`]);
  const box = h("section", { class: "card" }, h("h2", { text: "Tokens" }), h("div", { class: "toolbar" },
    data.samples.length > 1 ? select("path", String(sample), names, (value) => set({ sample: value, path: data.samples[Number(value)].path })) : null,
    select("colour by", colour, COLOURS, (value) => set({ colour: value }))), scale, text, more);
  async function load(offset) {
    const found = await get("tokens", { id: data.info.id, sample, offset });
    const painted = painter(found, colour, data.info);
    scale.textContent = found.unknown ? `${painted.words} (${found.unknown})` : painted.words;
    text.append(...found.texts.map((one, index) => token(found, index, one, painted)));
    const next = offset + found.texts.length;
    more.replaceChildren(...(next < found.total ? [h("button", { text: `More (${number(found.total - next)} tokens)`, onclick: () => load(next) })] : []));
  }
  await load(0);
  return box;
}

function token(found, index, text, painted) {
  const mask = found.mask[index];
  const facts = [`token ${found.offset + index}, id ${found.ids[index]}`];
  if (mask) {
    facts.push(`version ${found.versions[index]}`, `log-prob ${number(found.logprobs[index])}`);
    if (found.advantages) facts.push(`advantage ${number(found.advantages[index])}`);
    if (found.differences) facts.push(`trainer − engine ${number(found.differences[index])}`);
  } else facts.push("given or trained elsewhere: masked");
  const element = h("span", { class: mask ? "" : "masked", title: facts.join("\n"), text: shown(text) });
  const back = mask ? painted.colour(index) : null;
  if (back) element.style.backgroundColor = back;
  return element;
}

function shown(text) {
  return text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}

function painter(found, colour, info) {
  const spread = (values) => Math.max(...values.filter((value, index) => found.mask[index] && value !== null).map(Math.abs), 1e-9);
  const signed = (values, words) => {
    if (!values || !values.some((value, index) => found.mask[index] && value !== null)) return { words: `${words}: the trainer has not told it of this sample`, colour: () => null };
    const most = spread(values);
    return { words: `${words}: red below 0, green above; strongest ${number(most)}`, colour: (at) => values[at] === null ? null : `rgba(var(${values[at] < 0 ? "--negative" : "--positive"}), ${(0.08 + 0.6 * Math.min(Math.abs(values[at]) / most, 1)).toFixed(3)})` };
  };
  switch (colour) {
    case "advantage": return signed(found.advantages, "advantage");
    case "difference": return signed(found.differences, "trainer − engine log-prob");
    case "logprob": {
      const most = spread(found.logprobs);
      return { words: `log-prob: the stronger, the less likely; least ${number(-most)}`, colour: (at) => `rgba(var(--neutral), ${(0.05 + 0.65 * Math.abs(found.logprobs[at]) / most).toFixed(3)})` };
    }
    case "version": {
      const [low, high] = [info.oldest ?? 0, info.newest ?? 0];
      return { words: low === high ? `all of version ${low}` : `version ${low} (light) to ${high} (strong)`, colour: (at) => `rgba(var(--neutral), ${(0.15 + 0.5 * (found.versions[at] - low) / Math.max(high - low, 1)).toFixed(3)})` };
    }
    default: return { words: "masked tokens are dimmed", colour: () => null };
  }
}
