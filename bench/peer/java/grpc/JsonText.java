import java.util.Collection;
import java.util.Map;
import java.util.stream.Collectors;

/** Text of JSON values. The packages of the client have no library for it. */
final class JsonText {
    private JsonText() {
    }

    static String of(Object value) {
        if (value instanceof Map<?, ?> map) {
            return map.entrySet().stream().map(entry -> of(entry.getKey()) + ": " + of(entry.getValue()))
                .collect(Collectors.joining(", ", "{", "}"));
        }
        if (value instanceof Collection<?> values) return values.stream().map(JsonText::of).collect(Collectors.joining(", ", "[", "]"));
        if (value == null || value instanceof Number || value instanceof Boolean) return String.valueOf(value);
        return text(value.toString());
    }

    private static String text(String value) {
        StringBuilder text = new StringBuilder("\"");
        for (char each : value.toCharArray()) {
            if (each == '"' || each == '\\') text.append('\\').append(each);
            else if (each < ' ') text.append(String.format("\\u%04x", (int) each));
            else text.append(each);
        }
        return text.append('"').toString();
    }
}
