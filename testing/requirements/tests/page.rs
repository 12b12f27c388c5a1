//! The table is complete, and every name in it exists.

use portolan_requirements::{Survey, root};

fn survey() -> Survey {
    Survey::of(&root()).expect("the tree can be read")
}

#[test]
fn every_requirement_has_code_and_a_test_or_a_reason_and_every_name_leads_somewhere() {
    let complaints = survey().complaints();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn all_numbers_of_rfc_9293_are_there() {
    let survey = survey();
    let rfc = survey.rfcs.first().expect("an RFC");
    assert_eq!(rfc.number, 9293);
    for (level, count) in [("MUST", 69), ("SHLD", 31), ("MAY", 18), ("REC", 1)] {
        for number in 1..=count {
            let id = format!("{level}-{number}");
            assert!(
                rfc.requirements.iter().any(|r| r.id == id),
                "{id} is missing"
            );
        }
    }
}
