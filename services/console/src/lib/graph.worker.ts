/** Places the nodes of a graph, beside the page so that a large graph does not stop it. */

import dagre from "@dagrejs/dagre";

export interface GraphQuestion {
  nodes: { name: string; width: number; after: string[] }[];
  height: number;
}

export interface GraphAnswer {
  width: number;
  height: number;
  nodes: { name: string; x: number; y: number; width: number }[];
  edges: { from: string; to: string; points: { x: number; y: number }[] }[];
}

onmessage = (event: MessageEvent<GraphQuestion>) => {
  const { nodes, height } = event.data;
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "LR", nodesep: 16, ranksep: 48, marginx: 8, marginy: 8 });
  graph.setDefaultEdgeLabel(() => ({}));
  const names = new Set(nodes.map((node) => node.name));
  for (const { name, width } of nodes) graph.setNode(name, { width, height });
  for (const { name, after } of nodes) {
    for (const each of after) if (names.has(each)) graph.setEdge(each, name);
  }
  dagre.layout(graph);
  const size = graph.graph();
  const answer: GraphAnswer = {
    width: size.width ?? 0,
    height: size.height ?? 0,
    nodes: nodes.map(({ name }) => {
      const { x, y, width } = graph.node(name);
      return { name, x: x - width / 2, y: y - height / 2, width };
    }),
    edges: graph.edges().map((edge) => ({ from: edge.v, to: edge.w, points: graph.edge(edge).points })),
  };
  postMessage(answer);
};
