"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
const bytes = n => { let u = 0; while (n >= 1000 && u < 5) { n /= 1000; u++; } return (u && n < 10 ? n.toFixed(1) : Math.round(n)) + " " + ["B", "kB", "MB", "GB", "TB", "PB"][u]; };
const make = (tag, text, name) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (name) e.className = name; return e; };
const palette = ["#8ecae6", "#ffd166", "#b8e0a0", "#f4a8a0", "#d5b8f0", "#f7c59f", "#7fd1c7", "#e3a6d0", "#c9d1d9", "#c6c26a", "#9fb4f5"];
const addKey = (to, color, text) => { const key = make("span", "", "key"), whole = make("span", "", "together"); key.style.background = color; whole.append(key, text); to.append(whole, " "); };
const cells = (tr, texts, tag = "td") => { texts.forEach((text, i) => { const e = make(tag, text, i ? "n" : ""); if (tag === "th") e.scope = "col"; tr.append(e); }); return tr; };
const count = n => n.toLocaleString("en");
