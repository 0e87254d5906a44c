"""Parity: whether the server computes the checkpoint.

REQUIRED INPUTS:
    plan = results/plan.json
    server = results/<capture>/server.json, and selftest.safetensors beside it
    <model>/config.json and weights

OUTPUTS:
    parity = results/<capture>/parity.json
    page = results/<capture>/parity.html
"""


rule parity:
    """
    Compare the self-test's rows of every layer with a Hugging Face forward pass of the checkpoint.

    The weights are read layer by layer, so the job needs the memory of about one layer. Every
    manifest needs the result. The rule makes no result that is there already, whatever became of
    the attestation: otherwise a server would start for nothing. Extraction waits for this job where
    it takes less than two minutes, and the job then holds the server; else both run at once.
    """
    input:
        plan=ancient(RESULTS.plan),
        server=ancient(CAPTURE.server),
        model=ancient(MODEL / "config.json"),
    output:
        parity=CAPTURE.parity,
        page=report(CAPTURE.parity_page, caption="report/parity.rst", category="Parity"),
    log:
        RESULTS.log("{capture}", "parity"),
    benchmark:
        RESULTS.benchmark("{capture}", "parity")
    wildcard_constraints:
        capture=(
            ask.captures_without_parity(RESULTS.root, CONFIG)
            if workflow.is_main_process
            else ask.ANY_CAPTURE
        ),
    priority: 2
    # A second attempt would find refused rows withdrawn, and hide why.
    retries: 0
    threads: parity_threads
    params:
        asked=ask.parity_asked(CONFIG),
        hold=hold_option,
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/check_parity.py" \
            --config "$DRAFTSTATES_CONFIG" \
            --plan {input.plan:q} \
            --code {params.asked[code]} \
            {params.hold} \
            --threads {threads} \
            --output {output.parity:q} \
            --html {output.page:q} >{log:q} 2>&1
        """
