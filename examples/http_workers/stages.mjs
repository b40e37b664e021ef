// The stages of the type `greeting`: compose, then sign.
import { createHash } from 'node:crypto'
import { next } from './worker.mjs'

export default {
  async start({ name }) {
    if (!name) throw Object.assign(new TypeError('whom to greet?'), { permanent: true })
    return next('sign', { text: `Hello, ${name}!` })
  },

  async sign({ text }) {
    return { text, sha256: createHash('sha256').update(text).digest('hex') }
  },
}
