// A worker in Node (18 or later) without dependencies: it runs the stages of a module, several
// tasks at a time.
//
//     PENSTOCK_GATEWAY=http://127.0.0.1:8420 node worker.mjs TYPE STAGES.mjs
//
// If the gateway authenticates, set PENSTOCK_API_KEY to a key with the role worker.
//
// The module's default export has a function per stage: (context, { task, signal }) => result. A
// plain result means done, next(stage, context) enters another stage, and retry(delayMs) retries
// later. An exception fails the attempt, permanently when it has `permanent: true`. `signal` is
// aborted when the attempt is revoked; its result is then not reported.
import { realpathSync } from 'node:fs'
import { hostname } from 'node:os'
import { resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { pathToFileURL } from 'node:url'

const [type, file] = process.argv.slice(2)
const gateway = process.env.PENSTOCK_GATEWAY ?? 'http://127.0.0.1:8420'
const apiKey = process.env.PENSTOCK_API_KEY
const slots = Number(process.env.SLOTS ?? 4)
const worker = `${hostname()}-${process.pid}`
const stopping = new AbortController()

class Refused extends Error {}

// Repeats a request after Retry-After when the gateway does not answer, or answers 429 or 503.
async function post(path, body, signal) {
  for (;;) {
    let waitS = 1
    try {
      const answer = await fetch(gateway + path, {
        method: 'POST',
        headers: { 'Content-Type': 'application/json', ...(apiKey && { Authorization: `Bearer ${apiKey}` }) },
        body: JSON.stringify({ worker, ...body }),
        signal,
      })
      if (answer.ok) return await answer.json()
      const problem = await answer.text()
      if (![429, 502, 503, 504].includes(answer.status)) throw new Refused(problem)
      waitS = Number(answer.headers.get('Retry-After') ?? 1)
    } catch (error) {
      if (error instanceof Refused || signal?.aborted) throw error
    }
    await sleep(waitS * 1000, undefined, { signal })
  }
}

// Sends a heartbeat three times in each lease; aborts the task when its attempt is revoked.
async function beat(fence, task, gone, ended) {
  for (;;) {
    await sleep(task.lease_ms / 3, undefined, { signal: ended })
    const entry = { ...fence, outcome: 'progress', lease_ms: task.lease_ms }
    const answer = await post('/set_task', { results: [entry] }, ended)
    if (answer.gone.length) return gone.abort(new Error(answer.gone[0].why))
  }
}

async function run(stage, task, signal) {
  try {
    if (!stage) throw Object.assign(new Error(`no stage ${task.stage} here`), { permanent: true })
    const result = await stage(task.context, { task, signal })
    return result instanceof Outcome ? result.entry : { outcome: 'done', context: result ?? null }
  } catch (error) {
    const { name = 'Error', message = String(error), stack, permanent } = error ?? {}
    return { outcome: 'fail', error: { kind: name, message, traceback: stack }, permanent: permanent === true }
  }
}

async function work(stages, task) {
  const fence = { id: task.id, step: task.step, stage: task.stage, attempt: task.attempt }
  const gone = new AbortController()
  const ended = new AbortController()
  const beating = beat(fence, task, gone, ended.signal).catch((error) => {
    if (!ended.signal.aborted) throw error
  })
  const entry = await run(stages[task.stage], task, gone.signal)
  ended.abort()
  await beating
  if (gone.signal.aborted) return console.log(`task ${task.id} is no longer ours: ${gone.signal.reason.message}`)
  const report = (what) => post('/set_task', { results: [{ ...fence, ...what }] })
  let answer
  try {
    answer = await report(entry)
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    answer = { rejected: [error.message] }
  }
  if (answer.rejected.length) {
    // For example too long, or not in the format of a report.
    const message = JSON.stringify(answer.rejected).slice(0, 2000)
    await report({ outcome: 'fail', error: { kind: 'Refused', message } })
  }
  console.log(`task ${task.id} ${task.stage}: ${entry.outcome}`)
}

async function slot(stages) {
  // For the list of workers.
  const about = { host: hostname(), stages: Object.keys(stages) }
  while (!stopping.signal.aborted) {
    let held
    try {
      held = await post('/hold_task', { type, max: 1, wait_s: 20, ...about }, stopping.signal)
    } catch (error) {
      if (stopping.signal.aborted) return
      if (!(error instanceof Refused)) throw error
      console.error(error.message) // For example, the type is not registered yet.
      await sleep(1000)
      continue
    }
    for (const task of held.tasks) await work(stages, task)
  }
}

class Outcome {
  constructor(entry) {
    this.entry = entry
  }
}

export const next = (stage, context) => new Outcome({ outcome: 'next', next_stage: stage, context })
export const retry = (delayMs) => new Outcome({ outcome: 'retry', delay_ms: delayMs })

async function main() {
  // Running tasks finish; waiting for work stops at once.
  for (const signal of ['SIGTERM', 'SIGINT']) process.once(signal, () => stopping.abort())
  const { default: stages } = await import(pathToFileURL(resolve(file)).href)
  await Promise.all(Array.from({ length: slots }, () => slot(stages)))
}

// Not when a module of stages imports `next` and `retry` from here.
if (import.meta.url === pathToFileURL(realpathSync(process.argv[1])).href) main()
