"""The instrumented server, tested before it is used.

REQUIRED INPUTS:
    plan = results/plan.json
    <model>/config.json and weights

OUTPUTS:
    server = results/<capture>/server.json, and selftest.safetensors beside it

The server is no rule's output: its life is a lease (`draftstates/server/`). This rule takes the
lease, and the extracting jobs share it. The server ends when it is idle or when this run is gone.
The rule is in the graph only if a shard or parity is missing; otherwise no server starts.
"""


rule server:
    """
    Start the server, let it test itself, and record versions, flags and the figures of the test.
    """
    input:
        plan=ancient(RESULTS.plan),
        model=ancient(MODEL / "config.json"),
    output:
        server=CAPTURE.server,
    log:
        RESULTS.log("{capture}", "server"),
    benchmark:
        RESULTS.benchmark("{capture}", "server")
    retries: 1
    params:
        # A longer prompt is captured in every layer; the kept rows stay.
        parity_tokens=CONFIG.checks.parity_tokens,
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/server.py" \
            --config "$DRAFTSTATES_CONFIG" \
            --plan {input.plan:q} \
            --output {output.server:q} >{log:q} 2>&1
        """
