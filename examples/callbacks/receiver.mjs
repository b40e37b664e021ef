// Receives callbacks in Node (18 or later) without dependencies, and verifies their signatures.
//
//     node receiver.mjs PORT KEY[,KEY…] [URL]
//
// A key is a shared secret (whsec_…) or a public key (whpk_…); give several while they are rotated.
// With URL, as tasks name this receiver, a callback that was made for another URL is refused.
import { createHmac, createPublicKey, timingSafeEqual, verify as verifySignature } from 'node:crypto'
import { createServer } from 'node:http'

const TOLERANCE_S = 300
// DER of an ed25519 public key, before its 32 bytes (RFC 8410).
const ED25519 = Buffer.from('302a300506032b6570032100', 'hex')

export function verify(headers, body, keys, audience) {
  const timestamp = headers['webhook-timestamp']
  if (!(Math.abs(Date.now() / 1000 - Number(timestamp)) <= TOLERANCE_S)) return false
  const id = audience ? `${audience} ${headers['webhook-id']}` : headers['webhook-id']
  const signatures = headers[audience ? 'webhook-audience-signature' : 'webhook-signature'] ?? ''
  // The signature covers the raw bytes, so verify before parsing.
  const content = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body])
  return signatures.split(' ').some((entry) => {
    const [version, text] = entry.split(',', 2)
    const signature = Buffer.from(text ?? '', 'base64')
    return keys.some((key) => {
      const raw = Buffer.from(key.slice(key.indexOf('_') + 1), 'base64')
      if (key.startsWith('whsec_') && version === 'v1') {
        const expected = createHmac('sha256', raw).update(content).digest()
        return signature.length === expected.length && timingSafeEqual(signature, expected)
      }
      if (key.startsWith('whpk_') && version === 'v1a') {
        const publicKey = createPublicKey({ key: Buffer.concat([ED25519, raw]), format: 'der', type: 'spki' })
        return verifySignature(null, content, publicKey, signature)
      }
      return false
    })
  })
}

const [port, keys, audience] = process.argv.slice(2)
createServer(async (request, response) => {
  const chunks = []
  for await (const chunk of request) chunks.push(chunk)
  const body = Buffer.concat(chunks)
  if (!verify(request.headers, body, keys.split(','), audience)) {
    return response.writeHead(401).end('the signature is not right\n')
  }
  console.log('done ', request.headers['webhook-id'], JSON.parse(body).event)
  // Any 2xx. Do slow work after the response, because slow targets are diverted.
  response.writeHead(204).end()
}).listen(Number(port), '127.0.0.1')
