//! Runs the cases on the kernel's stack alone, without Portolan. Needs root.

use portolan_bench::Effort;
use portolan_bench::bed::{Bed, Stack};
use portolan_bench::suites::{Case, Suite, cases};

#[test]
fn every_quick_case_measures_something_on_the_kernels_stack() {
    let bed = Bed::bare(portolan_netns::Bed::veth()).expect("a bed needs root and `cargo build`");
    let effort = Effort { quick: true };
    // One path is enough: paths differ in numbers only.
    let wanted = Suite::ALL.iter().flat_map(|suite| match suite {
        Suite::Paths => cases(*suite, effort).into_iter().take(1),
        // Portolan limits the link's rate.
        Suite::Qos => cases(*suite, effort).into_iter().take(0),
        suite => cases(*suite, effort).into_iter().take(usize::MAX),
    });
    let measurable = |case: &Case| case.is_of(Stack::Kernel) && case.missing_program().is_none();
    for case in wanted.filter(measurable) {
        let value = case
            .run(&bed, Stack::Kernel)
            .unwrap_or_else(|e| panic!("{}: {e}", case.name))
            .value;
        println!("{} {value} {}", case.name, case.unit);
        assert!(value > 0.0, "{}", case.name);
    }
}
