import { page } from "../shell.js";

page(() => {}, "main");
