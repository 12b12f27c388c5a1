//! The program whose instructions are counted transfers as much as it claims.

use std::process::Command;

#[test]
fn every_second_segment_is_acknowledged() {
    for size in ["1448", "65160"] {
        let output = Command::new(env!("CARGO_BIN_EXE_portolan-engine"))
            .args(["2000", "--size", size])
            .output()
            .expect("it starts");
        let report: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("it prints JSON");
        let count = |name: &str| report[name].as_u64().expect("a count");
        let (sent, acknowledgements) = (count("sent"), count("acknowledgements"));
        assert!(sent >= 2000 && count("received") == sent, "{report}");
        let segments = if size == "1448" { 2 } else { 1 };
        let fewest = sent / segments - sent / 20;
        assert!((fewest..=sent).contains(&acknowledgements), "{report}");
    }
}
