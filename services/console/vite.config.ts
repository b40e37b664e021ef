import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// `npm run dev` serves the sources and asks a gateway for everything else.
const gateway = process.env.PENSTOCK_URL ?? "http://127.0.0.1:8080";

export default defineConfig({
  base: "/console/",
  plugins: [svelte()],
  build: {
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    // A data: URL would break `script-src 'self'` for workers.
    assetsInlineLimit: 0,
  },
  server: { proxy: { "^/(?!console/)": { target: gateway, changeOrigin: true } } },
});
