// Vectors by the client of OpenAI's API for JavaScript; the word is the base URL; texts and vectors are JSON.
import OpenAI from "openai";
import { readFileSync } from "node:fs";

const client = new OpenAI({ apiKey: "none", baseURL: process.argv[2] });
const answer = await client.embeddings.create({ model: "current", input: JSON.parse(readFileSync(0, "utf8")) });
console.log(JSON.stringify(answer.data.map((each) => Array.from(each.embedding))));
