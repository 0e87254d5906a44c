"""The instrumented server, shown to be right before it is used.

REQUIRED INPUTS:
    plan = results/plan.json
    <model>/config.json and weights

OUTPUTS:
    server = results/<run>/server.json

The server is no rule's output: its life is a lease (`draftstates/server/`). This rule takes the lease, the extracting jobs
share it, and it ends when idle or when this run is gone. The rule is in the graph only where a shard is missing, so without
one no server starts.
"""


rule server:
    """
    Start the server, let it test itself, and record versions, flags and the figures of the test.
    """
    input:
        plan=ancient(PLAN),
        model=ancient(MODEL / "config.json"),
    output:
        server=RUN / "server.json",
    log:
        LOGS / "{run}" / "server.log",
    benchmark:
        BENCHMARKS / "{run}" / "server.tsv"
    retries: 1
    shell:
        """
        exec python scripts/server.py \
            --config "$DRAFTSTATES_CONFIG" \
            --plan {input.plan:q} \
            --output {output.server:q} >{log:q} 2>&1
        """
