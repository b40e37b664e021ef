"""The Helm chart, rendered by helm and judged without a cluster."""
