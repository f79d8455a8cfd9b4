//! Bodies of the fuzz targets of QMP and of libvirt's protocol: all that a hostile server can send.
//! They also run as ordinary tests.

use serde_json::Value;

use crate::monitors::libvirt::documents::{Stats, domains};
use crate::monitors::libvirt::protocol::{Message as Frame, messages as frames};
use crate::monitors::qemu::documents::{
    GuestStats, Moment, RunState, Sizes, balloon_among, is_migrating,
};
use crate::monitors::qemu::protocol::{Message, messages};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 2] =
    [("qmp_messages", qmp_messages), ("libvirt_messages", libvirt_messages)];

/// Reads messages, and each answer as every document.
///
/// # Panics
/// If a balloon is larger than its machine, or a moment is in the future.
pub fn qmp_messages(data: &[u8]) {
    let answers = messages(data).into_iter().filter_map(|message| match message {
        Ok(Message::Answer { result: Ok(answer), .. }) => Some(answer),
        _ => None,
    });
    let answers: Vec<Value> = answers.collect();
    let mut moment = None;
    let mut now_ms = 0;
    for (index, answer) in answers.iter().enumerate() {
        let _ = RunState::read(answer).map(|state| state.to_string());
        let _ = (is_migrating(answer), balloon_among("/machine", answer));
        if let Ok(sizes) = Sizes::read(answer, &answers[index / 2]) {
            let rest = answer["actual"].as_u64().unwrap_or(0);
            assert!(sizes.of_balloon.saturating_sub(rest) <= sizes.of_balloon);
        }
        let Ok(stats) = GuestStats::read(answer) else { continue };
        let Some(last_update) = stats.last_update else { continue };
        // A clock that is set to any time between two looks.
        let real_s = answers[index / 2]["last-update"].as_u64().unwrap_or(0);
        now_ms += 1000;
        let new = Moment::of(last_update, moment, real_s, now_ms);
        assert!(new.taken_ms.is_none_or(|taken_ms| taken_ms <= now_ms), "{new:?}");
        moment = Some(new);
    }
}

/// Reads messages of libvirt, and each content as every document.
///
/// # Panics
/// If a balloon is larger than its machine, or a UUID is not read as it was written.
pub fn libvirt_messages(data: &[u8]) {
    let contents = frames(data).into_iter().filter_map(|frame| match frame {
        Frame::Reply { result: Ok(content), .. } => Some(content),
        _ => None,
    });
    for content in contents.chain([data.to_vec()]) {
        for named in domains(&content).unwrap_or_default() {
            assert_eq!(named.domain().uuid_bytes(), Some(named.uuid));
        }
        if let Ok(Some(stats)) = Stats::read(&content) {
            assert!(stats.inflated_bytes() <= stats.maximum_bytes, "{stats:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lines that are nearly right.
    fn lines() -> impl Strategy<Value = Vec<u8>> {
        let number = prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0_u64..10];
        let line = (0..7_u8, number.clone(), number).prop_map(|(kind, a, b)| match kind {
            0 => format!(r#"{{"id":{a},"return":{{"last-update":{b},"stats":{{}}}}}}"#),
            1 => format!(r#"{{"id":1,"return":{{"base-memory":{a},"plugged-memory":{b}}}}}"#),
            2 => format!(r#"{{"id":1,"return":[{{"type":"dimm","data":{{"size":{a}}}}}]}}"#),
            3 => format!(r#"{{"id":1,"return":{{"actual":{a},"status":"{b}"}}}}"#),
            4 => r#"{"QMP":{}}"#.to_owned(),
            5 => r#"{"event":"STOP"}"#.to_owned(),
            _ => format!(r#"{{"id":{a},"error":{{"class":"x","desc":"{b}"}}}}"#),
        });
        let lines = prop::collection::vec(line, 0..12);
        lines.prop_map(|lines| (lines.join("\r\n") + "\r\n").into_bytes())
    }

    proptest! {
        #[test]
        fn any_bytes(data in prop::collection::vec(any::<u8>(), 0..400)) {
            for (_, body) in TARGETS {
                body(&data);
            }
        }

        #[test]
        fn nearly_right(data in lines(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            qmp_messages(&data);
            let mut data = data;
            let at = at.index(data.len());
            data[at] = byte;
            qmp_messages(&data);
        }

        #[test]
        fn nearly_right_replies(
            mut content in prop::collection::vec(0..9_u8, 4..200),
            at in any::<prop::sample::Index>(),
        ) {
            content[..3].fill(0);
            let at = at.index(content.len());
            content[at] = 0;
            libvirt_messages(&content);
            let length = (28 + content.len()) as u32;
            let numbers = [length, 0x2000_8086, 1, 344, 1, 1, 0];
            let mut data: Vec<u8> = numbers.into_iter().flat_map(u32::to_be_bytes).collect();
            data.append(&mut content);
            libvirt_messages(&data);
        }
    }
}
